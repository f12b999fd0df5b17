"""Steps of all optimizers of this process (from a global hook of torch), and the interval between two checks."""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_GROWTH = 1.01  # the growth of the shortest duration in each step, which adapts it to steps that become longer


class StepClock:
    """Measures the duration of a step as the shortest of the latest ones, since others may include an evaluation."""

    def __init__(self) -> None:
        self.shortest_s = math.inf
        self._ended_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Records that a step ends now."""
        if self._ended_s is not None:
            self.shortest_s = min(self.shortest_s * _GROWTH, now_s - self._ended_s)
        self._ended_s = now_s


class CheckInterval:
    """Chooses the steps in which a check runs, so that it takes a limited share of the time.

    Args:
        share: the largest share of the time that the check may take.
        first: the first step in which the check runs.
        least: the smallest number of steps between two runs.
        fixed: the number of steps between two runs, regardless of their cost; None if the cost determines it.
    """

    def __init__(self, share: float, *, first: int = 1, least: int = 1, fixed: int | None = None) -> None:
        self._share = share
        self._least = least
        self._fixed = fixed
        self._cost_s = math.inf
        self.next = first if fixed is None else fixed

    def is_due(self, step: int) -> bool:
        """Returns whether the check runs in this step."""
        return step >= self.next

    def plan(self, step: int, cost_s: float, step_s: float) -> None:
        """Chooses the step of the next run.

        Args:
            step: the step of the latest run.
            cost_s: the duration of that run.
            step_s: the duration of a step; infinite if it was not measured yet.
        """
        self._cost_s = min(cost_s, 2 * self._cost_s)  # in this run, the process may have waited for a core
        interval = math.ceil(self._cost_s / (self._share * step_s)) if step_s > 0 else self._least
        self.next = step + (self._fixed or max(self._least, interval))


class StepListener(Protocol):
    """An object that `OptimizerSteps` calls after a step of an optimizer."""

    def after_step(self, optimizer: torch.optim.Optimizer, found_inf: torch.Tensor | None) -> None:
        """Handles a step that has changed the parameters of `optimizer`, unless `found_inf` is nonzero.

        Args:
            optimizer: the optimizer.
            found_inf: a number on a device; the optimizer skips the step if it is not zero. None if the step was made.
        """
        ...


class OptimizerSteps:
    """The optimizers that have made steps, and the listeners for the next one; both are weak references."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()
        self._is_following = False

    def follow(self) -> None:
        """Starts recording which optimizers make steps; idempotent."""
        if not self._is_following:
            self._is_following = True
            register_optimizer_step_post_hook(self._after_step)

    def seen(self) -> list[torch.optim.Optimizer]:
        """Returns the optimizers that have made a step and still exist, in any order."""
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
        # With a GradScaler, a fused optimizer checks this itself, and then leaves the parameters unchanged.
        found_inf = getattr(optimizer, "found_inf", None)
        if not isinstance(found_inf, torch.Tensor) or found_inf.is_cpu:  # reading a device's number would wait for it
            if found_inf is not None and float(found_inf) > 0:
                return
            found_inf = None
        for listener in list(self._listeners):
            listener.after_step(optimizer, found_inf)


OPTIMIZER_STEPS = OptimizerSteps()
