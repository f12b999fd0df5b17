"""Reads which machines take part: `a:4,anna@b`, or a host file as Open MPI, MPICH, Horovod and DeepSpeed have it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.values import OptionError

_NAME = re.compile(
    r"(?:(?P<user>[\w.+-]+)@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])(?::(?P<slots>\d+))?"
)
_COUNTS = ("slots", "cpu", "count")
_USERS = ("user", "username")
_WITHOUT_MEANING = ("max_slots", "max-slots", "ifname", "binding")  # which limit or place what others would start


@dataclass(frozen=True)
class Host:
    """A machine: its name, whom to log in as there, and how many workers it runs; None if that is not said."""

    name: str
    user: str | None = None
    slots: int | None = None

    @property
    def destination(self) -> str:
        """The machine as ssh is given it."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def hosts_of(text: str) -> tuple[Host, ...]:
    """Returns the machines of `--hosts`: a list, or the name of a host file.

    >>> [(host.destination, host.slots) for host in hosts_of("a:4,anna@b:2,c")]
    [('a', 4), ('anna@b', 2), ('c', None)]

    Raises:
        OptionError: it is neither, or names no machine.
    """
    if os.path.isfile(text):
        try:
            return hosts_of_file(Path(text).read_text(), text)
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--hosts {text} cannot be read: {error}") from error
    if "/" in text:
        raise OptionError(f"--hosts {text}: there is no such file")
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise OptionError("--hosts names no machine; give HOST:N,HOST:N or the name of a host file")
    return _together(_host_of(word, "--hosts") for word in words)


def hosts_of_file(text: str, name: str) -> tuple[Host, ...]:
    """Returns the machines of a host file: lines with HOST, HOST:N or HOST slots=N, and comments after #.

    Raises:
        OptionError: a line is none of these; the message has its number.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if words:
            found.append(_host_of_line(words, f"{name}:{number}"))
    if not found:
        raise OptionError(f"{name} names no machine; it needs lines such as `node1 slots=4`")
    return _together(found)


def _host_of(word: str, where: str) -> Host:
    parts = _NAME.fullmatch(word)
    if parts is None:
        raise OptionError(
            f"{where}: {word!r} is neither HOST nor HOST:N with N workers; a login name stands before it (anna@HOST), "
            "and an IPv6 address in brackets"
        )
    slots = int(parts["slots"]) if parts["slots"] is not None else None
    if slots == 0:
        raise OptionError(f"{where}: {word!r} has no workers; leave the machine out")
    return Host(parts["host"].strip("[]"), parts["user"], slots)


def _host_of_line(words: list[str], where: str) -> Host:
    host = _host_of(words[0], where)
    user, slots = host.user, host.slots
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if equals and key in _COUNTS and value.isdecimal() and int(value):
            slots = int(value)
        elif equals and key in _USERS and re.fullmatch(r"[\w.+-]+", value):
            user = value
        elif not equals or key not in _WITHOUT_MEANING:
            raise OptionError(f"{where}: {word!r} is not known; a line is HOST, HOST:N or HOST slots=N")
    return Host(host.name, user, slots)


def _together(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Returns each machine once: one that is named several times has the workers of all its places."""
    places: dict[tuple[str, str | None], list[int | None]] = {}
    for host in hosts:
        places.setdefault((host.name, host.user), []).append(host.slots)
    return tuple(
        Host(name, user, slots[0] if len(slots) == 1 else sum(each or 1 for each in slots))
        for (name, user), slots in places.items()
    )
