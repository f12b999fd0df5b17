"""Proves a barrier: no rank leaves before all have come, and none waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.schedule.steps import Kind, Schedule
from paceline.schedule.verify.matching import ScheduleError, fault, moves_by_link


def verify_barrier(schedules: Sequence[Schedule]) -> None:
    """Checks that at its end every rank has heard of every rank's start.

    A SEND of nothing passes on what the earlier receives of its rank, in the order of steps, have brought, since it
    waits for these only. Later ones may have arrived by then, but the proof may not rely on that.

    Raises:
        ScheduleError: a rank may leave too early, or waits for ever.
    """
    for schedule in schedules:
        for number, step in enumerate(schedule.steps):
            blocks = step.src if step.kind == Kind.SEND else step.dst
            if step.kind not in (Kind.SEND, Kind.RECV) or blocks is None or blocks.length:
                raise fault(schedule, number, "a barrier sends and receives slices of no blocks")
    heard: list[dict[int, int | None]] = [
        {number: None for number, step in enumerate(schedule.steps) if step.kind == Kind.RECV} for schedule in schedules
    ]
    links = [deque(moves) for moves in moves_by_link(schedules)]
    progress = True
    while progress:
        progress = False
        for link in links:
            while link and (news := _news(heard, link[0].source, link[0].source_step)) is not None:
                heard[link[0].target][link[0].target_step] = news
                link.popleft()
                progress = True
    stuck = [link[0] for link in links if link]
    if stuck:
        move = min(stuck, key=lambda move: (move.source_step, move.source))
        raise fault(schedules[move.source], move.source_step, "waits for ever for an earlier receive of its rank")
    for rank, schedule in enumerate(schedules):
        unheard = ((1 << len(schedules)) - 1) & ~(_news(heard, rank, len(schedule.steps)) or 0)
        if unheard:
            missing = unheard.bit_length() - 1
            raise ScheduleError(f"{schedule.algorithm} barrier: rank {rank} may leave before rank {missing} has come")


def _news(heard: Sequence[dict[int, int | None]], rank: int, before: int) -> int | None:
    """Returns which ranks, as bits, a rank has surely heard of before a step; None while a receive is outstanding."""
    known = 1 << rank
    for number, news in heard[rank].items():
        if number >= before:
            break
        if news is None:
            return None
        known |= news
    return known
