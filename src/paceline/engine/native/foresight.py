"""Says that calls take other times than were predicted; the core compares them (native/call/foresight.hpp)."""

from __future__ import annotations

from typing import NamedTuple

from paceline.record.names import DTYPES, OPERATIONS
from paceline.schedule.cost import spell_seconds
from paceline.schedule.registry import name_of


class Surprise(NamedTuple):
    """Calls of one kind that were far from their prediction, in the order of `_core.ScheduleGroup.surprise`.

    Attributes:
        operation, algorithm, dtype: the kind, by the numbers of the core.
        elements: how many each call had.
        calls: how many of them were made.
        least_ns: how long the shortest of them took; `predicted_ns` how long each should have taken.
    """

    operation: int
    algorithm: int
    dtype: int
    elements: int
    calls: int
    least_ns: int
    predicted_ns: int


def words_of(found: Surprise) -> str:
    """Returns what is said of a surprise."""
    least, predicted = spell_seconds(found.least_ns / 1e9), spell_seconds(found.predicted_ns / 1e9)
    return (
        f"{OPERATIONS[found.operation]} of {found.elements:,} {DTYPES[found.dtype]} by {name_of(found.algorithm)} took "
        f"{least} at least in {found.calls} calls, but was predicted to take {predicted}: another algorithm may be "
        "faster. PACELINE_COSTS and PACELINE_NETWORK say what messages cost, and PACELINE_ALGORITHM forces one"
    )
