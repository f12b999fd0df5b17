"""How far the clocks of two machines are apart, from questions and answers between them.

A machine asks another what time it is, and the answer comes back. Wherever in between the other one has read its clock,
it did so after the question was sent and before the answer came; so the middle of the two is off by at most half the
round trip. That holds for any delays, however unequal they are. The clocks of two machines run at slightly different
speeds, so what was measured grows old: each is allowed `DRIFT` of error for the time since.

Puts the times of several machines on one clock, by the calls that end on all ranks at about the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.operate.diagnosis.job_snapshot import RankCall, RankState

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def shifted(rank: RankState, by_s: float) -> RankState:
    """Returns what is known of a rank, with `by_s` added to all times."""

    def moved(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + by_s

    calls = tuple(
        replace(call, arrived_s=call.arrived_s + by_s, ended_s=moved(call.ended_s), come_s=moved(call.come_s))
        for call in rank.calls
    )
    ending = None if rank.ending is None else replace(rank.ending, at_s=rank.ending.at_s + by_s)
    return replace(rank, calls=calls, since_s=moved(rank.since_s), ending=ending)


def aligned(ranks: Sequence[RankState], clocks: Sequence[str]) -> list[RankState]:
    """Returns the ranks with all times on the first one's clock; `clocks` are equal for those that share one.

    A clock that shares no call with the first one stays as it is.
    """
    offsets = {clocks[0]: 0.0} if ranks else {}
    for rank, clock in zip(ranks, clocks, strict=True):
        if clock not in offsets:
            offsets[clock] = _offset_s(ranks[0], rank)
    return [
        shifted(rank, offsets[clock]) if offsets[clock] else rank for rank, clock in zip(ranks, clocks, strict=True)
    ]


def _offset_s(reference: RankState, other: RankState) -> float:
    """Returns what to add to the other's times: calls in which all wait for all end together."""
    mine, theirs = _ends(reference.calls), _ends(other.calls)
    from statistics import median  # of all that a verdict imports, only this needs it

    return median([mine[key] - theirs[key] for key in mine.keys() & theirs.keys()] or [0.0])


def _ends(calls: Sequence[RankCall]) -> dict[tuple[str, int], float]:
    return {
        (call.group, call.sequence): call.ended_s
        for call in calls
        if call.ended_s is not None and not call.is_open and call.header.operation in _TOGETHER
    }


DRIFT = 1e-4  # two clocks that are kept by NTP differ by less, and undisciplined quartz hardly by more
_SAMPLES = 128


@dataclass(frozen=True)
class Offset:
    """What is added to this machine's CLOCK_MONOTONIC to get the other's: to within `error_ns`, at `at_ns` here."""

    offset_ns: int
    error_ns: int
    at_ns: int

    def at(self, now_ns: int) -> Offset:
        """Returns what is known of the offset at another time."""
        return Offset(self.offset_ns, self.error_ns + round(DRIFT * abs(now_ns - self.at_ns)), now_ns)


class OffsetEstimate:
    """The latest answers of one machine, of which the best one counts."""

    def __init__(self) -> None:
        self._samples: deque[Offset] = deque(maxlen=_SAMPLES)

    def add(self, asked_ns: int, told_ns: int, heard_ns: int) -> None:
        """Takes an answer: when it was asked for and when it came, by this machine's clock, and what it says."""
        if heard_ns >= asked_ns:
            middle_ns, half_ns = (asked_ns + heard_ns) // 2, (heard_ns - asked_ns) // 2
            error_ns = half_ns + round(DRIFT * half_ns) + 2  # the other's clock has drifted within the half, too
            self._samples.append(Offset(told_ns - middle_ns, error_ns, middle_ns))

    def at(self, now_ns: int) -> Offset | None:
        """Returns the offset with the smallest error at `now_ns`; None without an answer."""
        return min((each.at(now_ns) for each in self._samples), key=lambda each: each.error_ns, default=None)
