"""What a step would take if its slowest rank were like the median: the what-if line.

In data-parallel training every step lasts as long as its slowest rank's own work and what cannot be hidden of the
communication, which is the same for all. The time that one rank costs is therefore the distance of its own time from
that of the next slowest, or from the median if that is longer, in each step (Lin et al., OSDI 2025, replay whole
traces for the same question).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from paceline.observe.live.picture import StepColumn, WhatIf
from paceline.observe.live.spans import milliseconds

_FEWEST_STEPS = 5
_WORTH_SAYING = 0.03  # of a step


def what_if(steps: Sequence[StepColumn]) -> WhatIf | None:
    """Returns the rank whose slowness costs most in these steps; None if none costs much."""
    if len(steps) < _FEWEST_STEPS:
        return None
    costs: dict[int, float] = {}
    for column in steps:
        slowest, cost = _cost_of(column)
        if slowest is not None:
            costs[slowest] = costs.get(slowest, 0.0) + cost
    if not costs:
        return None
    rank = max(costs, key=lambda each: costs[each])
    now = fmean(column.duration for column in steps)
    then = now - costs[rank] / len(steps)
    if now - then < _WORTH_SAYING * now:
        return None
    less = (now - then) / now
    sentence = (
        f"If rank {rank} ran like the median, a step would take {milliseconds(then)} instead of {milliseconds(now)} "
        f"({less:.0%} less)."
    )
    return WhatIf(sentence, rank, round(now, 2), round(then, 2))


def _cost_of(column: StepColumn) -> tuple[int | None, float]:
    """Returns the slowest rank of a step, and how much shorter the step would be if the rank were like the median."""
    own = sorted((time, rank) for rank, time in enumerate(column.compute) if time is not None)
    if len(own) < 2:
        return None, 0.0
    (longest, rank), (second, _) = own[-1], own[-2]
    return rank, longest - max(second, median(time for time, _ in own))
