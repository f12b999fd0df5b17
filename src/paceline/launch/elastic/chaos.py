"""What `--chaos` does to the workers, and when: drawn from a seed, without a process or a clock."""

from __future__ import annotations

import heapq
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

KINDS = ("kill", "stop", "cut")

_SHORTEST_S = 0.01
_Candidate = TypeVar("_Candidate")


@dataclass(frozen=True)
class Chaos:
    """Acts of each kind come at random times; `intervals_s` has the mean time between two of a kind."""

    intervals_s: tuple[tuple[str, float], ...]
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Chaos:
        """Parses the value of the flag.

        >>> Chaos.parse("kill:2s,stop:5s,seed=7")
        Chaos(intervals_s=(('kill', 2.0), ('stop', 5.0)), seed=7)
        """
        seed, intervals_s = 0, {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            if part.startswith("seed=") and part.removeprefix("seed=").isdecimal():
                seed = int(part.removeprefix("seed="))
                continue
            kind, _, interval = part.partition(":")
            if kind not in KINDS:
                raise ArgumentTypeError(f"{part!r} is neither KIND:SECONDS, with {', '.join(KINDS)}, nor seed=NUMBER")
            if kind in intervals_s:
                raise ArgumentTypeError(f"{kind} is there twice")
            intervals_s[kind] = _seconds(interval, part)
        if not intervals_s:
            raise ArgumentTypeError(f"{text!r} names no kind; kill:2s,seed=7 kills one every 2 seconds or so")
        return cls(tuple(intervals_s.items()), seed)

    @property
    def cuts(self) -> bool:
        """Whether connections are to be cut."""
        return any(kind == "cut" for kind, _ in self.intervals_s)

    def __str__(self) -> str:
        return ",".join([*(f"{kind}:{interval_s:g}s" for kind, interval_s in self.intervals_s), f"seed={self.seed}"])


@dataclass(frozen=True, order=True)
class Act:
    """Something done to a worker: when, in seconds since the chaos began, what, and a number in [0, 1) for to whom."""

    at_s: float
    kind: str
    choice: float

    def victim_of(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """Returns the candidate that `choice` falls on."""
        return candidates[int(self.choice * len(candidates))]


def acts_of(chaos: Chaos, machine: int = 0) -> Iterator[Act]:
    """Returns the acts, without end, in the order of their times; those of each machine are its own."""
    return heapq.merge(*(_acts(kind, interval_s, chaos.seed, machine) for kind, interval_s in chaos.intervals_s))


def _acts(kind: str, interval_s: float, seed: int, machine: int) -> Iterator[Act]:
    random, at_s = Random(f"{seed}/{machine}/{kind}"), 0.0
    while True:
        at_s += random.expovariate(1.0 / interval_s)
        yield Act(at_s, kind, random.random())


def _seconds(text: str, part: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not _SHORTEST_S <= value < float("inf"):
        raise ArgumentTypeError(f"{part!r} has no mean time between two acts, such as 2s, of {_SHORTEST_S:g}s or more")
    return value
