"""What is noted of one step while a script runs, and the medians of many; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.plan.calibration import Times


@dataclass
class StepNotes:
    """One step, from the end of an optimizer's step to the end of its next; times are of one clock, in seconds.

    Attributes:
        forward_s, backward_s: each forward and each backward.
        ready_s: by parameter, when its gradient was there, from the beginning of the last backward that reached it.
        samples: how many the forwards got.
    """

    begin_s: float
    end_s: float = 0.0
    data_s: float = 0.0
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    optimizer_s: float = 0.0
    ready_s: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.end_s - self.begin_s

    @property
    def rest_s(self) -> float:
        """What is none of the parts."""
        known = self.data_s + sum(self.forward_s) + sum(self.backward_s) + self.optimizer_s
        return max(0.0, self.seconds - known)


class TooFewStepsError(RuntimeError):
    """A script ended, or never trained, before anything could be measured."""


def times_of(steps: Sequence[StepNotes]) -> Times:
    """Returns the medians of the parts of steps.

    Raises:
        TooFewStepsError: there are no steps with a forward and a backward.
    """
    if not any(step.forward_s and step.backward_s for step in steps):
        raise TooFewStepsError(
            f"{len(steps)} steps of an optimizer were seen, and none had a forward and a backward of a module with "
            "parameters; the script must train for more steps than are left out at its beginning"
        )
    forwards = [seconds for step in steps for seconds in step.forward_s]
    backwards = [seconds for step in steps for seconds in step.backward_s]
    return Times(
        data_s=median(step.data_s for step in steps),
        forward_s=median(forwards),
        backward_s=median(backwards),
        optimizer_s=median(step.optimizer_s for step in steps),
        rest_s=median(step.rest_s for step in steps),
    )


def forwards_of(steps: Sequence[StepNotes]) -> int:
    """Returns how many forwards there are in a step, by the median."""
    return max(1, round(median(len(step.backward_s) for step in steps)))


def ready_of(steps: Sequence[StepNotes]) -> Mapping[str, float]:
    """Returns the median time at which each gradient was there, of those that any step had."""
    names = dict.fromkeys(name for step in steps for name in step.ready_s)
    return {name: median(step.ready_s[name] for step in steps if name in step.ready_s) for name in names}


def samples_of(steps: Sequence[StepNotes]) -> float | None:
    """Returns the samples of a step by the median; None if no forward got a tensor."""
    return median(step.samples for step in steps) or None
