"""Follows the steps of all optimizers of this process, with one of torch's global hooks.

How often a check runs, so that it takes at most a certain share of the time that steps take.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_FORGETS = 1.01  # how fast the shortest step is forgotten, when steps become longer


class StepClock:
    """Measures how long a step takes, as the shortest of the latest ones: others may include an evaluation."""

    def __init__(self) -> None:
        self.shortest_s = math.inf
        self._ended_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Notes that a step ends now."""
        if self._ended_s is not None:
            self.shortest_s = min(self.shortest_s * _FORGETS, now_s - self._ended_s)
        self._ended_s = now_s


class CheckInterval:
    """Decides in which steps something is done that costs time.

    Args:
        share: the largest share of the time that it may take.
        first: the first step in which it is done.
        least: the least number of steps from one time to the next.
        fixed: the number of steps from one time to the next, whatever it costs; None if the costs decide.
    """

    def __init__(self, share: float, *, first: int = 1, least: int = 1, fixed: int | None = None) -> None:
        self._share = share
        self._least = least
        self._fixed = fixed
        self._cost_s = math.inf
        self.next = first if fixed is None else fixed

    def is_due(self, step: int) -> bool:
        """Returns whether it is done in this step."""
        return step >= self.next

    def plan(self, step: int, cost_s: float, step_s: float) -> None:
        """Plans when it is done next.

        Args:
            step: the step in which it was done.
            cost_s: how long it took.
            step_s: how long a step takes; infinite if that is not known yet.
        """
        self._cost_s = min(cost_s, 2 * self._cost_s)  # a process may have had to wait for a core just then
        wanted = math.ceil(self._cost_s / (self._share * step_s)) if step_s > 0 else self._least
        self.next = step + (self._fixed or max(self._least, wanted))


class StepListener(Protocol):
    """Something that waits for the step of an optimizer."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Is called after a step that has changed the parameters of `optimizer`."""
        ...


class OptimizerSteps:
    """The optimizers that have made steps, and who waits for the next one; both are kept weakly."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()
        self._is_following = False

    def follow(self) -> None:
        """Begins to note which optimizers make steps; idempotent."""
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
        """Calls the listener no more; idempotent."""
        self._listeners.discard(listener)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._seen.add(optimizer)
        if not self._listeners:
            return
        # A GradScaler lets fused optimizers see for themselves that they must leave the parameters alone.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return
        for listener in list(self._listeners):
            listener.after_step(optimizer)


OPTIMIZER_STEPS = OptimizerSteps()
