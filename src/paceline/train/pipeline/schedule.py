"""PipelineSchedule: the order of each rank's computations as data; functions that create well-known schedules.

| name | source |
| --- | --- |
| `gpipe` | Huang et al. 2019, "GPipe": all forward passes, then all backward passes |
| `1f1b` | Narayanan et al. 2019, "PipeDream", without its stale weights: alternating forward and backward passes |
| `interleaved` | Narayanan et al. 2021, "Efficient Large-Scale Language Model Training": several stages per rank |
| `zero_bubble` | Qi et al. 2023, "Zero Bubble Pipeline Parallelism", schedule ZB-H1 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class PipelinePhase(Enum):
    """A computation on a micro-batch in a stage.

    BACKWARD comprises INPUT and WEIGHT, which zero-bubble schedules execute separately.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The gradient of the stage's input, for which the previous stage waits."""
    WEIGHT = "W"
    """The gradients of the stage's weights, for which no stage waits."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One phase of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    phase: PipelinePhase

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The computations of each rank in a step.

    Attributes:
        name: the name of the schedule.
        ranks_of_stages: for each stage, the rank that computes it.
        micro_batches: the number of micro-batches per batch.
        orders: for each rank, its tasks in the order of execution.
    """

    name: str
    ranks_of_stages: tuple[int, ...]
    micro_batches: int
    orders: tuple[tuple[Task, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ranks_of_stages)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.orders)


def gpipe(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Creates a schedule that runs all forward passes first, and therefore keeps all activations."""
    _require_single(stages_per_rank, "gpipe")
    orders = []
    for rank in range(ranks):
        forwards = [Task(rank, each, PipelinePhase.FORWARD) for each in range(micro_batches)]
        orders.append((*forwards, *(Task(rank, each, PipelinePhase.BACKWARD) for each in range(micro_batches))))
    return PipelineSchedule("gpipe", tuple(range(ranks)), micro_batches, tuple(orders))


def one_forward_one_backward(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Creates a schedule in which rank r keeps the activations of at most `ranks - r` micro-batches."""
    _require_single(stages_per_rank, "1f1b")
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        forwards = [Task(rank, each, PipelinePhase.FORWARD) for each in range(micro_batches)]
        backwards = [Task(rank, each, PipelinePhase.BACKWARD) for each in range(micro_batches)]
        orders.append(_alternated(forwards, backwards, ahead))
    return PipelineSchedule("1f1b", tuple(range(ranks)), micro_batches, tuple(orders))


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Creates a schedule in which rank r computes the stages r, r + ranks, r + 2 ranks and so on.

    Raises:
        ValueError: the number of micro-batches is not a multiple of the number of ranks.
    """
    if micro_batches % ranks:
        raise ValueError(
            f"pipeline: the interleaved schedule needs a multiple of {ranks} micro-batches, one for each rank; "
            f"there are {micro_batches}"
        )
    each_phase = micro_batches * stages_per_rank
    orders = []
    for rank in range(ranks):

        def nth(number: int, is_forward: bool, rank: int = rank) -> Task:
            round_, within = divmod(number, ranks * stages_per_rank)
            chunk, micro_batch = divmod(within, ranks)
            chunk = chunk if is_forward else stages_per_rank - 1 - chunk
            phase = PipelinePhase.FORWARD if is_forward else PipelinePhase.BACKWARD
            return Task(chunk * ranks + rank, round_ * ranks + micro_batch, phase)

        ahead = min(2 * (ranks - 1 - rank) + (stages_per_rank - 1) * ranks, each_phase)
        forwards = [nth(each, True) for each in range(each_phase)]
        backwards = [nth(each, False) for each in range(each_phase)]
        orders.append(_alternated(forwards, backwards, ahead))
    placed = tuple(stage % ranks for stage in range(ranks * stages_per_rank))
    return PipelineSchedule("interleaved", placed, micro_batches, tuple(orders))


def zero_bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Creates a 1F1B schedule in which weight gradients are deferred to a rank's idle time.

    The schedule keeps no more activations than 1F1B. Rank r defers the weight gradients of r micro-batches.
    """
    _require_single(stages_per_rank, "zero_bubble")
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order: list[Task] = [Task(rank, each, PipelinePhase.FORWARD) for each in range(ahead)]
        weights = 0
        for each in range(micro_batches):
            if ahead + each < micro_batches:
                order.append(Task(rank, ahead + each, PipelinePhase.FORWARD))
            order.append(Task(rank, each, PipelinePhase.INPUT))
            if each >= rank:
                order.append(Task(rank, weights, PipelinePhase.WEIGHT))
                weights += 1
        order += [Task(rank, each, PipelinePhase.WEIGHT) for each in range(weights, micro_batches)]
        orders.append(tuple(order))
    return PipelineSchedule("zero_bubble", tuple(range(ranks)), micro_batches, tuple(orders))


def forwards_only(plan: PipelineSchedule) -> PipelineSchedule:
    """Returns a schedule that contains only the forward passes of `plan`, in the same order."""
    orders = tuple(tuple(task for task in order if task.phase is PipelinePhase.FORWARD) for order in plan.orders)
    return PipelineSchedule(f"{plan.name}, forwards only", plan.ranks_of_stages, plan.micro_batches, orders)


SCHEDULES: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def make_pipeline_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """Creates the schedule named `name`.

    Raises:
        ValueError: the name is unknown, or the schedule does not support one of the numbers.
    """
    if name not in SCHEDULES:
        raise ValueError(f"pipeline: there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("stages_per_rank", stages_per_rank)):
        if number < 1:
            raise ValueError(f"pipeline: {what} is {number}; it must be at least 1")
    return SCHEDULES[name](ranks, micro_batches, stages_per_rank)


def _alternated(forwards: list[Task], backwards: list[Task], ahead: int) -> tuple[Task, ...]:
    """Returns `ahead` forward passes, then alternating forward and backward passes, then the other backward passes."""
    later: Iterable[Task] = forwards[ahead:]
    turns = [task for pair in zip(later, backwards, strict=False) for task in pair]
    return (*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :])


def _require_single(stages_per_rank: int, name: str) -> None:
    if stages_per_rank != 1:
        raise ValueError(
            f"pipeline: the schedule {name!r} has one stage a rank, not {stages_per_rank}; use 'interleaved'"
        )
