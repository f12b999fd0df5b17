"""Parsers for the values of flags and PET_* variables, for use as argparse's `type=`. Each error is one sentence."""

from __future__ import annotations

import signal
from argparse import ArgumentTypeError
from enum import IntFlag

from paceline.durations import whole_number
from paceline.operate.launch.workers.environment import allowed_cores
from paceline.operate.launch.workers.placement import count_gpus

_SERVED_BY_US = ("c10d", "paceline")
_ON, _OFF = ("true", "t", "yes", "y"), ("", "false", "f", "no", "n")


class OptionError(ValueError):
    """Raised for contradictory flags; the message mentions the flags and the remedy."""


class Streams(IntFlag):
    """Output streams, numbered as in torchrun's `Std`."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


StreamsOfRanks = dict[int | None, Streams]  # keyed by local rank; the key None stands for all other ranks


def streams_of(chosen: StreamsOfRanks, local_rank: int) -> Streams:
    """Returns the streams selected for a local rank."""
    return chosen.get(local_rank, chosen.get(None, Streams.NONE))


def parse_workers(text: str) -> int:
    """Parses a number of workers, `gpu`, `cpu` or `auto`. `gpu` can yield 0, because other machines may have GPUs."""
    if text in ("auto", "gpu"):
        gpus = count_gpus()
        return gpus or (allowed_cores() if text == "auto" else 0)
    if text == "cpu":
        return allowed_cores()
    return _found(whole_number(text, least=1), text, "neither a number of at least 1 nor auto, gpu or cpu")


def parse_nodes(text: str) -> tuple[int, int]:
    """Parses a number of machines: `N` or `MIN:MAX`."""
    first, _, last = text.partition(":")
    least = whole_number(first, least=1)
    most = whole_number(last) if ":" in text else least
    if least is None or most is None or least > most:
        raise ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor MIN:MAX with MIN at most MAX")
    return least, most


def _found(number: int | None, text: str, fault: str) -> int:
    if number is None:
        raise ArgumentTypeError(f"{text!r} is {fault}")
    return number


def parse_from_0(text: str) -> int:
    """Parses an integer that is at least 0."""
    return _found(whole_number(text), text, "not a number of at least 0")


def parse_from_1(text: str) -> int:
    """Parses an integer that is at least 1."""
    return _found(whole_number(text, least=1), text, "not a number of at least 1")


def parse_port(text: str) -> int:
    """Parses a TCP port."""
    return _found(whole_number(text, least=1, most=65535), text, "not a port from 1 to 65535")


def parse_switch(text: str) -> bool:
    """Parses the value of a switch: a number as in torchrun's variables, or a word as in its `--rdzv-conf`."""
    word = text.strip().lower()
    number = whole_number(word)
    if number is None and word not in (*_ON, *_OFF):
        raise ArgumentTypeError(f"{text!r} is neither 1 (on) nor 0 (off)")
    return bool(number) if number is not None else word in _ON


def parse_seconds(text: str) -> float:
    """Parses a time in seconds that is at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def parse_backend(text: str) -> str:
    """Parses `static` or `c10d`."""
    if text == "static":
        return text
    if text in _SERVED_BY_US:
        return "c10d"
    raise ArgumentTypeError(
        f"{text!r} is not supported; the rendezvous runs on one of the machines: use `c10d` for machines in any order, "
        "or `static` for machines numbered by --node-rank. etcd is not needed"
    )


def parse_settings(text: str) -> dict[str, str]:
    """Parses settings in the form `key=value,key=value`."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ArgumentTypeError(f"{part!r} is not KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Parses signal names, with or without the prefix SIG."""
    found = []
    for word in filter(None, (word.strip().upper() for word in text.split(","))):
        name = word if word.startswith("SIG") else f"SIG{word}"
        number = getattr(signal.Signals, name, None)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ArgumentTypeError(f"{word!r} is not a signal that can be handled")
        found.append(number)
    return tuple(found)


def parse_rank_or_none(text: str) -> int | None:
    """Parses a rank or `none`."""
    return None if text == "none" else _found(whole_number(text), text, "neither a rank nor none")


def parse_streams(text: str) -> StreamsOfRanks:
    """Parses the streams of all ranks, such as `3`, or the streams of each local rank, such as `0:1,1:2`."""
    chosen: StreamsOfRanks = {}
    for part in text.split(",") if ":" in text else [text]:
        name, colon, number = part.rpartition(":")
        rank, streams = whole_number(name.strip()), whole_number(number.strip(), most=Streams.BOTH)
        if streams is None or (colon and rank is None):
            raise ArgumentTypeError(
                f"{text!r} is neither 0 (none), 1 (stdout), 2 (stderr) or 3 (both), nor a list of these by local rank, "
                "as in 0:1,1:2"
            )
        chosen[rank] = Streams(streams)
    return chosen


def parse_ranks(text: str) -> frozenset[int]:
    """Parses a list of local ranks; an empty list stands for all ranks."""
    numbers = [whole_number(word.strip()) for word in text.split(",") if word.strip()]
    return frozenset(_found(number, text, "not a list of local ranks, as in 0,1,2") for number in numbers)


def parse_words(text: str) -> tuple[str, ...]:
    """Parses words separated by commas; a double comma stands for a comma inside a word."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


def parse_exports(text: str) -> dict[str, str | None]:
    """Parses `NAME,NAME=VALUE`. A variable without a value maps to None and is copied from this machine."""
    found: dict[str, str | None] = {}
    for part in filter(None, parse_words(text)):
        name, equals, value = part.partition("=")
        if not name.isidentifier():
            raise ArgumentTypeError(f"{part!r} is neither NAME nor NAME=VALUE")
        found[name] = value if equals else None
    return found


def parse_modules(text: str) -> tuple[str, ...]:
    """Parses module names separated by commas."""
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ArgumentTypeError(f"{name!r} is not the name of a module, as in `import {name}`")
    return names


def refuse_logs_specs(text: str) -> None:
    """Rejects torchrun's log plug-ins, which depend on torch classes."""
    raise ArgumentTypeError(
        f"plug-ins for logs ({text!r}) are torchrun's own; use --log-dir, --tee, --redirects and --local-ranks-filter"
    )
