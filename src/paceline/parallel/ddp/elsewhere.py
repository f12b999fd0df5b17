"""Lets somebody else average a module's gradients: an elastic job, in which the ranks may change during a backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.backward_state import State
from paceline.parallel.ddp.fused_step import step_params
from paceline.parallel.ddp.reducer import Reducer
from paceline.parallel.health.module_checks import ModuleChecks
from paceline.parallel.tracked_tensors import TrackedTensors


class Averages(Protocol):
    """Averages the gradients of a module's parameters, wherever they are."""

    def before_forward(self) -> None:
        """Is called before a forward whose backward averages."""
        ...

    def average(self) -> None:
        """Replaces the gradients by their mean over the ranks."""
        ...

    def skip(self) -> None:
        """Does the same on a rank whose own gradients do not count."""
        ...

    def set_weight(self, weight: float) -> None:
        """Sets the weight of this rank in the next mean."""
        ...


class DelegatingReducer(Reducer):
    """Decides when a backward is over, and has `averages` do the rest; nothing is reduced before that.

    Args:
        tracked: the module's tensors.
        bucket_caps_bytes: as for `Reducer`.
        group: a group of this rank only.
        averages: what averages.
        name: the name of the module's class, for messages.
        find_unused: whether parameters may have no gradient after a backward.
        checks: looks at this rank's gradients.
    """

    def __init__(
        self,
        tracked: TrackedTensors,
        bucket_caps_bytes: Sequence[int],
        group: ProcessGroup,
        averages: Averages,
        *,
        name: str,
        find_unused: bool,
        checks: ModuleChecks,
    ) -> None:
        super().__init__(
            tracked,
            bucket_caps_bytes,
            group,
            name=name,
            find_unused=find_unused,
            static_graph=False,
            overlap=False,
            checks=checks,
        )
        self._averages = averages

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged."""
        return self._gradients.params

    def before_forward(self, inputs: object) -> None:
        """Requires that the latest backward averaged all gradients.

        Raises:
            RuntimeError: parameters have no gradient, which the message names with the fix.
        """
        super().before_forward(inputs)
        self._averages.before_forward()

    def require_averaged(self) -> None:
        """Requires that the latest backward left no parameter without a gradient, for which the others would wait.

        Raises:
            RuntimeError: it did, which the message says with the names and the fix.
        """
        if self._state is State.INCOMPLETE:
            self._raise_missing("the last backward")

    def make_static(self) -> None:
        """Lets backwards leave out parameters; nothing else depends on whether they are alike."""
        self._find_unused = True

    def skip(self) -> None:
        """Takes part in the mean of the others' gradients without a backward, or after one that failed."""
        started = time.perf_counter()
        self._state = State.IDLE
        self._averages.skip()
        step_params(self._stepped)
        self.wait_s += time.perf_counter() - started

    def _average(self) -> None:
        is_repeating, is_awaited = self._state is State.REPEATING, self._state is not State.IDLE
        if is_repeating and not self._gradients.any_present():
            self._state = State.IDLE  # it computed the gradients of other tensors, which concerns this rank only
            return
        if not (is_repeating or self._find_unused) and self._gradients.are_incomplete():
            self._require_used()
            self._state = State.INCOMPLETE if is_awaited else State.IDLE
            return
        self.checks.look_at(self._gradients.names, self._gradients.values())
        self._averages.average()
        self.checks.end([each for each in self._gradients.values() if each is not None])
        self._state = State.IDLE
