"""Clock offsets between machines, measured with messages or estimated from calls that end simultaneously.

`OffsetEstimate` computes the offset from requests for another machine's time. That machine reads its clock at some
moment between the sending of the request and the receipt of the response. The midpoint between these two times differs
from that moment by at most half the round-trip time, even if the two delays differ. Because clocks run at slightly
different speeds, the error grows with the age of the measurement, at the rate `DRIFT`.

Instead of messages, `aligned` uses calls that end on all ranks at about the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.operate.diagnosis.job_snapshot import RankCall, RankState

DRIFT = 1e-4  # NTP-disciplined clocks drift less, and free-running quartz barely more
_SAMPLES = 128
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclass(frozen=True)
class Offset:
    """Nanoseconds by which another machine's CLOCK_MONOTONIC is ahead of this one's, and the error bound at `at_ns`."""

    offset_ns: int
    error_ns: int
    at_ns: int

    def at(self, now_ns: int) -> Offset:
        """Returns the offset with its error bound at another time."""
        return Offset(self.offset_ns, self.error_ns + round(DRIFT * abs(now_ns - self.at_ns)), now_ns)


class OffsetEstimate:
    """Estimate of another machine's clock offset, based on the best of its latest responses."""

    def __init__(self) -> None:
        self._samples: deque[Offset] = deque(maxlen=_SAMPLES)

    def add(self, requested_ns: int, remote_ns: int, received_ns: int) -> None:
        """Adds a response.

        Args:
            requested_ns: the time at which the request was sent, on this machine's clock.
            remote_ns: the time in the response, on the other machine's clock.
            received_ns: the time at which the response was received, on this machine's clock.
        """
        if received_ns >= requested_ns:
            middle_ns, half_ns = (requested_ns + received_ns) // 2, (received_ns - requested_ns) // 2
            error_ns = half_ns + round(DRIFT * half_ns) + 2  # the other clock also drifts during half the round trip
            self._samples.append(Offset(remote_ns - middle_ns, error_ns, middle_ns))

    def at(self, now_ns: int) -> Offset | None:
        """Returns the offset with the smallest error at `now_ns`, or None if there is no response."""
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
            all_arrived_s=moved(call.all_arrived_s),
            reached_s=moved(call.reached_s),
        )
        for call in rank.calls
    )
    ending = None if rank.ending is None else replace(rank.ending, at_s=rank.ending.at_s + by_s)
    phase = None if rank.phase is None else replace(rank.phase, since_s=rank.phase.since_s + by_s)
    wait = None if rank.store_wait is None else replace(rank.store_wait, since_s=rank.store_wait.since_s + by_s)
    return replace(rank, calls=calls, since_s=moved(rank.since_s), ending=ending, phase=phase, store_wait=wait)


def aligned(ranks: Sequence[RankState], clocks: Sequence[str]) -> list[RankState]:
    """Converts the times of all ranks to the first rank's clock.

    Args:
        ranks: the states of the ranks.
        clocks: the name of each rank's clock. If no call connects a clock to the first one, the times of the ranks on
            that clock stay unchanged.
    """
    offsets = {clocks[0]: 0.0} if ranks else {}
    for rank, clock in zip(ranks, clocks, strict=True):
        if clock not in offsets:
            offsets[clock] = _offset_s(ranks[0], rank)
    return [
        shifted(rank, offsets[clock]) if offsets[clock] else rank for rank, clock in zip(ranks, clocks, strict=True)
    ]


def _offset_s(reference: RankState, other: RankState) -> float:
    """Returns the seconds to add to the other rank's times so that calls made by both ranks end simultaneously."""
    mine, theirs = _ends(reference.calls), _ends(other.calls)
    from statistics import median  # slow to import, and only needed here

    return median([mine[key] - theirs[key] for key in mine.keys() & theirs.keys()] or [0.0])


def _ends(calls: Sequence[RankCall]) -> dict[tuple[str, int], float]:
    return {
        (call.group, call.sequence): call.ended_s
        for call in calls
        if call.ended_s is not None and not call.is_open and call.header.operation in _TOGETHER
    }
