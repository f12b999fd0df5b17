"""Spells a schedule as the numbers that the core reads."""

from __future__ import annotations

from array import array

from paceline.schedule.steps import Schedule, Slice


def flatten(schedule: Schedule) -> bytes:
    """Returns nine 32-bit integers for each step, in the layout that native/executor/schedule.hpp expects."""
    flat = array("i")
    for step in schedule.steps:
        flat.extend((step.kind, step.final, step.peer, *_numbers(step.dst), *_numbers(step.src)))
    return flat.tobytes()


def _numbers(slice_: Slice | None) -> tuple[int, int, int]:
    return (slice_.buffer, slice_.first, slice_.length) if slice_ is not None else (1, 0, 0)
