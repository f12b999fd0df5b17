"""Puts the times of several machines on one clock, by the calls that end on all ranks at about the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.observe.evidence import Call, Rank

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def shifted(rank: Rank, by_s: float) -> Rank:
    """Returns what is known of a rank, with `by_s` added to all times."""

    def moved(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + by_s

    calls = tuple(
        replace(call, arrived_s=call.arrived_s + by_s, ended_s=moved(call.ended_s), come_s=moved(call.come_s))
        for call in rank.calls
    )
    ending = None if rank.ending is None else replace(rank.ending, at_s=rank.ending.at_s + by_s)
    return replace(rank, calls=calls, since_s=moved(rank.since_s), ending=ending)


def aligned(ranks: Sequence[Rank], clocks: Sequence[str]) -> list[Rank]:
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


def _offset_s(reference: Rank, other: Rank) -> float:
    """Returns what to add to the other's times: calls in which all wait for all end together."""
    mine, theirs = _ends(reference.calls), _ends(other.calls)
    from statistics import median  # of all that a verdict imports, only this needs it

    return median([mine[key] - theirs[key] for key in mine.keys() & theirs.keys()] or [0.0])


def _ends(calls: Sequence[Call]) -> dict[tuple[str, int], float]:
    return {
        (call.group, call.sequence): call.ended_s
        for call in calls
        if call.ended_s is not None and not call.is_open and call.header.operation in _TOGETHER
    }
