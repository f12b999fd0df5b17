"""What the ranks of a pipeline compute, in which order, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What is computed for a micro-batch in a stage.

    A BACKWARD is an INPUT followed by a WEIGHT; schedules without a bubble of the backward separate the two.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The gradient of the stage's input, for which the stage before waits."""
    WEIGHT = "W"
    """The gradients of the stage's weights, for which nobody waits."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One phase of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.micro_batch}"


@dataclass(frozen=True)
class Plan:
    """What each rank computes in a step.

    Attributes:
        name: what the schedule is called.
        ranks_of_stages: the rank that has each stage.
        micro_batches: into how many a batch is divided.
        orders: for each rank, its tasks in the order in which it carries them out.
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
