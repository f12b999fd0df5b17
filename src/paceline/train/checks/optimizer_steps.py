"""OptimizerSteps: reports the steps of all optimizers in this process; CheckInterval: schedules checks."""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_GROWTH = 1.01  # the recorded minimum grows by this factor per step, to adapt to steps that become longer


class StepClock:
    """Measures the step duration as the shortest recent duration, because longer steps may include an evaluation."""

    def __init__(self) -> None:
        self.shortest_s = math.inf
        self._ended_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Records the end of a step."""
        if self._ended_s is not None:
            self.shortest_s = min(self.shortest_s * _GROWTH, now_s - self._ended_s)
        self._ended_s = now_s


class CheckInterval:
    """Chooses the steps in which a check runs, and thereby limits the check's share of the training time.

    Args:
        share: the maximum share of the training time that the check may take, from 0 to 1.
        first: the first step in which the check runs.
        least: the minimum number of steps between two runs.
        fixed: a fixed number of steps between two runs. If None, the number depends on the measured cost.
    """

    def __init__(self, share: float, *, first: int = 1, least: int = 1, fixed: int | None = None) -> None:
        self._share = share
        self._least = least
        self._fixed = fixed
        self._cost_s = math.inf
        self.next = first if fixed is None else fixed

    def is_due(self, step: int) -> bool:
        """Returns True if the check runs in this step."""
        return step >= self.next

    def plan(self, step: int, cost_s: float, step_s: float) -> None:
        """Chooses the step of the next run after a run in `step`, which took `cost_s`.

        A training step takes `step_s`, which is infinite if not measured yet.
        """
        self._cost_s = min(cost_s, 2 * self._cost_s)  # limits the effect of a run that waited for a core
        interval = math.ceil(self._cost_s / (self._share * step_s)) if step_s > 0 else self._least
        self.next = step + (self._fixed or max(self._least, interval))


class StepListener(Protocol):
    """Interface for objects that `OptimizerSteps` notifies after each optimizer step."""

    def after_step(self, optimizer: torch.optim.Optimizer, found_inf: torch.Tensor | None) -> None:
        """Handles a step of `optimizer`.

        `found_inf` is a number on a device, nonzero if the optimizer skipped the step, or None if it did not.
        """
        ...


class OptimizerSteps:
    """Records the optimizers that have stepped, and calls listeners after each step; holds weak references to both."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()
        self._is_following = False

    def follow(self) -> None:
        """Starts recording optimizer steps; idempotent."""
        if not self._is_following:
            self._is_following = True
            register_optimizer_step_post_hook(self._after_step)

    def seen(self) -> list[torch.optim.Optimizer]:
        """Returns the optimizers that have stepped and still exist, in arbitrary order."""
        return list(self._seen)

    def listen(self, listener: StepListener) -> None:
        """Calls the listener after each step until `ignore` is called."""
        self._listeners.add(listener)

    def ignore(self, listener: StepListener) -> None:
        """Stops calling the listener; idempotent."""
        self._listeners.discard(listener)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._seen.add(optimizer)
        if not self._listeners:
            return
        # With a GradScaler, a fused optimizer reads `found_inf` and leaves the parameters unchanged if it is nonzero.
        found_inf = getattr(optimizer, "found_inf", None)
        if not isinstance(found_inf, torch.Tensor) or found_inf.is_cpu:  # reading a number on the CPU requires no wait
            if found_inf is not None and float(found_inf) > 0:
                return
            found_inf = None
        for listener in list(self._listeners):
            listener.after_step(optimizer, found_inf)


OPTIMIZER_STEPS = OptimizerSteps()
