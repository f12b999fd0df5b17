"""Parsing of the options `--elastic`, `--min-workers`, `--preload` and `--chaos`.

`actions_of` generates chaos actions from a seed and uses neither processes nor a clock. `chaos_runner.py` performs the
actions.
"""

from __future__ import annotations

import argparse
import heapq
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from paceline.durations import whole_number
from paceline.operate.launch.option_types import OptionError

CHAOS_KINDS = ("kill", "stop", "cut")

_SHORTEST_S = 0.01
_Candidate = TypeVar("_Candidate")


@dataclass(frozen=True)
class Chaos:
    """The configuration of the random actions performed on workers."""

    intervals_s: tuple[tuple[str, float], ...]  # kinds of actions, each with the mean time between actions
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Chaos:
        """Parses the value of `--chaos`.

        >>> Chaos.parse("kill:2s,stop:5s,seed=7")
        Chaos(intervals_s=(('kill', 2.0), ('stop', 5.0)), seed=7)
        """
        seed, intervals_s = 0, {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            if part.startswith("seed=") and (number := whole_number(part.removeprefix("seed="))) is not None:
                seed = number
                continue
            kind, _, interval = part.partition(":")
            if kind not in CHAOS_KINDS:
                raise ArgumentTypeError(
                    f"{part!r} is neither KIND:SECONDS, with {', '.join(CHAOS_KINDS)}, nor seed=NUMBER"
                )
            if kind in intervals_s:
                raise ArgumentTypeError(f"{kind} is given twice")
            intervals_s[kind] = _seconds(interval, part)
        if not intervals_s:
            raise ArgumentTypeError(f"{text!r} specifies no kind; kill:2s,seed=7 kills a worker about every 2 seconds")
        return cls(tuple(intervals_s.items()), seed)

    @property
    def cuts(self) -> bool:
        """Whether any of the actions cuts connections."""
        return any(kind == "cut" for kind, _ in self.intervals_s)

    def __str__(self) -> str:
        return ",".join([*(f"{kind}:{interval_s:g}s" for kind, interval_s in self.intervals_s), f"seed={self.seed}"])


@dataclass(frozen=True, order=True)
class ChaosAction:
    """A random action performed on a worker."""

    at_s: float  # time since the actions were started
    kind: str
    choice: float  # number in [0, 1) that selects the worker

    def victim_of(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """Returns the candidate selected by `choice`."""
        return candidates[int(self.choice * len(candidates))]


def actions_of(chaos: Chaos, machine: int = 0) -> Iterator[ChaosAction]:
    """Returns an endless iterator over a machine's actions, ordered by time."""
    return heapq.merge(*(_actions(kind, interval_s, chaos.seed, machine) for kind, interval_s in chaos.intervals_s))


def _actions(kind: str, interval_s: float, seed: int, machine: int) -> Iterator[ChaosAction]:
    random, at_s = Random(f"{seed}/{machine}/{kind}"), 0.0
    while True:
        at_s += random.expovariate(1.0 / interval_s)
        yield ChaosAction(at_s, kind, random.random())


def _seconds(text: str, part: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not _SHORTEST_S <= value < float("inf"):
        raise ArgumentTypeError(
            f"{part!r} needs a mean time between actions of at least {_SHORTEST_S:g}s, as in kill:2s"
        )
    return value


@dataclass(frozen=True)
class ElasticOptions:
    """The options of an elastic job."""

    min_workers: int = 1  # the job waits while it has fewer workers
    most_replacements: int | None = None  # limit for this machine; None for no limit
    chaos: Chaos | None = None
    preload: tuple[str, ...] = ()  # modules to import before forking workers


def elastic_of(options: argparse.Namespace, workers: int, has_several_machines: bool) -> ElasticOptions | None:
    """Returns the options of an elastic job, or None if the job is not elastic."""
    if not options.elastic:
        if options.chaos is not None:
            raise OptionError(
                "--chaos needs --elastic: without it, killing a worker ends the job or restarts all workers"
            )
        if options.min_workers is not None:
            raise OptionError("--min-workers needs --elastic: without it, a job runs with all of its workers or none")
        if options.preload:
            raise OptionError("--preload needs --elastic, because it only speeds up the start of replacement workers")
        return None
    if options.preload and (options.no_python or options.start_method == "spawn"):
        raise OptionError(
            "--preload needs workers that are forked; leave out --start-method spawn and --no-python, with which each "
            "worker is a separate program"
        )
    least = 1 if options.min_workers is None else options.min_workers
    if least > workers and not has_several_machines:
        raise OptionError(
            f"--min-workers {least} is more than the {workers} workers of this machine; set --nproc-per-node too"
        )
    if options.chaos is not None and not has_several_machines:
        _check_chaos(options.chaos, workers)
    return ElasticOptions(least, options.max_restarts, options.chaos, options.preload)


def _check_chaos(chaos: Chaos, workers: int) -> None:
    if chaos.cuts:
        raise OptionError(
            "--chaos cut needs several machines: workers on one machine communicate through shared memory, so there "
            "are no connections to cut"
        )
    if workers == 1:
        raise OptionError(
            "--chaos needs at least two workers on a machine, because it spares the last one, without which the job's "
            "state would be lost; set --nproc-per-node"
        )
