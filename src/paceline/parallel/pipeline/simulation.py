"""How long a plan takes, if each task and each message takes a given time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.parallel.pipeline.plan import Phase, Plan, Task
from paceline.parallel.pipeline.program import needed

UNIT: Mapping[Phase, float] = {Phase.FORWARD: 1.0, Phase.INPUT: 1.0, Phase.WEIGHT: 1.0, Phase.BACKWARD: 2.0}
"""A forward as long as either half of a backward, which is about right for layers of matrices."""


@dataclass(frozen=True)
class Timing:
    """When the tasks of a plan are carried out, in seconds from the first one's beginning.

    Attributes:
        begins: when each task begins, and `ends` when it is over.
        busy: for how long each rank computes.
    """

    begins: Mapping[Task, float]
    ends: Mapping[Task, float]
    busy: tuple[float, ...]

    @property
    def length(self) -> float:
        """How long the step takes."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """For which share of the step the ranks wait, on average."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.length)


def simulate(
    plan: Plan, times: Mapping[Phase, float] | Callable[[Task], float] = UNIT, message_s: float = 0.0
) -> Timing:
    """Returns when everything happens.

    Args:
        times: how long each phase takes, or a function that says it for each task.
        message_s: how long after the end of a task its result is on another rank.
    """
    lasts: Callable[[Task], float] = times if callable(times) else lambda task: times[task.phase]
    begins: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    free = [0.0] * plan.ranks
    waiting = [list(reversed(order)) for order in plan.orders]
    while any(waiting):
        before = len(ends)
        for rank, order in enumerate(waiting):
            while order and (ready := _ready(order[-1], plan, ends, message_s)) is not None:
                task = order.pop()
                begins[task] = max(free[rank], ready)
                free[rank] = ends[task] = begins[task] + lasts(task)
        if len(ends) == before:
            raise ValueError(f"the plan {plan.name} hangs; see paceline.parallel.pipeline.proof.prove")
    busy = tuple(sum(ends[task] - begins[task] for task in order) for order in plan.orders)
    return Timing(begins, ends, busy)


def _ready(task: Task, plan: Plan, ends: Mapping[Task, float], message_s: float) -> float | None:
    """Returns when a task has what it needs; None if that is not known yet."""
    message = needed(task, plan)
    travels = 0.0 if message is None else message_s
    if task.phase is Phase.WEIGHT:
        return ends.get(Task(task.stage, task.micro_batch, Phase.INPUT))
    if task.phase is Phase.FORWARD:
        if task.stage == 0:
            return 0.0
        end = ends.get(Task(task.stage - 1, task.micro_batch, Phase.FORWARD))
        return None if end is None else end + travels
    own = ends.get(Task(task.stage, task.micro_batch, Phase.FORWARD))
    if task.stage == plan.stages - 1 or own is None:
        return own
    later = Task(task.stage + 1, task.micro_batch, Phase.BACKWARD)
    end = ends.get(later, ends.get(Task(task.stage + 1, task.micro_batch, Phase.INPUT)))
    return None if end is None else max(own, end + travels)
