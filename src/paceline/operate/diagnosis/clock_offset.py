"""Offsets between the clocks of machines: measured by messages, or estimated from calls that end at the same time.

`OffsetEstimate` uses requests for another machine's time. That machine reads its clock after the request was sent and
before the answer is received, so the midpoint of the two is off by at most half the round trip, however unequal the two
delays are. Clocks run at slightly different speeds, so the error of a measurement grows by `DRIFT` with its age.

`aligned` needs no messages: it uses calls that end on all ranks at about the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.operate.diagnosis.job_snapshot import RankCall, RankState

DRIFT = 1e-4  # clocks under NTP drift apart more slowly, and free-running quartz hardly faster
_SAMPLES = 128
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclass(frozen=True)
class Offset:
    """Nanoseconds to add to this machine's CLOCK_MONOTONIC for the other's; `error_ns` bounds the error at `at_ns`."""

    offset_ns: int
    error_ns: int
    at_ns: int

    def at(self, now_ns: int) -> Offset:
        """Returns the offset with its error at another time."""
        return Offset(self.offset_ns, self.error_ns + round(DRIFT * abs(now_ns - self.at_ns)), now_ns)


class OffsetEstimate:
    """Estimate of another machine's offset, from the best of its latest answers."""

    def __init__(self) -> None:
        self._samples: deque[Offset] = deque(maxlen=_SAMPLES)

    def add(self, asked_ns: int, told_ns: int, heard_ns: int) -> None:
        """Adds an answer.

        Args:
            asked_ns: the time of the request, on this machine's clock.
            told_ns: the time in the answer, on the other machine's clock.
            heard_ns: the time at which the answer was received, on this machine's clock.
        """
        if heard_ns >= asked_ns:
            middle_ns, half_ns = (asked_ns + heard_ns) // 2, (heard_ns - asked_ns) // 2
            error_ns = half_ns + round(DRIFT * half_ns) + 2  # the other clock drifts within that half, too
            self._samples.append(Offset(told_ns - middle_ns, error_ns, middle_ns))

    def at(self, now_ns: int) -> Offset | None:
        """Returns the offset with the smallest error at `now_ns`; None without an answer."""
        return min((sample.at(now_ns) for sample in self._samples), key=lambda offset: offset.error_ns, default=None)


def shifted(rank: RankState, by_s: float) -> RankState:
    """Returns a rank's state with `by_s` seconds added to all times."""

    def moved(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + by_s

    calls = tuple(
        replace(
            call,
            arrived_s=call.arrived_s + by_s,
            ended_s=moved(call.ended_s),
            come_s=moved(call.come_s),
            reached_s=moved(call.reached_s),
        )
        for call in rank.calls
    )
    ending = None if rank.ending is None else replace(rank.ending, at_s=rank.ending.at_s + by_s)
    phase = None if rank.phase is None else replace(rank.phase, since_s=rank.phase.since_s + by_s)
    return replace(rank, calls=calls, since_s=moved(rank.since_s), ending=ending, phase=phase)


def aligned(ranks: Sequence[RankState], clocks: Sequence[str]) -> list[RankState]:
    """Returns the ranks with all times on the first one's clock.

    Args:
        ranks: the states of the ranks.
        clocks: the name of each rank's clock. A clock that shares no call with the first one is left as it is.
    """
    offsets = {clocks[0]: 0.0} if ranks else {}
    for rank, clock in zip(ranks, clocks, strict=True):
        if clock not in offsets:
            offsets[clock] = _offset_s(ranks[0], rank)
    return [
        shifted(rank, offsets[clock]) if offsets[clock] else rank for rank, clock in zip(ranks, clocks, strict=True)
    ]


def _offset_s(reference: RankState, other: RankState) -> float:
    """Returns the seconds to add to the other's times so that calls that end on all ranks at once coincide."""
    mine, theirs = _ends(reference.calls), _ends(other.calls)
    from statistics import median  # a slow import, which diagnoses need only here

    return median([mine[key] - theirs[key] for key in mine.keys() & theirs.keys()] or [0.0])


def _ends(calls: Sequence[RankCall]) -> dict[tuple[str, int], float]:
    return {
        (call.group, call.sequence): call.ended_s
        for call in calls
        if call.ended_s is not None and not call.is_open and call.header.operation in _TOGETHER
    }
