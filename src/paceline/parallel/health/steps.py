"""Follows the steps of all optimizers of this process, with one of torch's global hooks."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """Something that waits for the step of an optimizer."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Is called after a step that has changed the parameters of `optimizer`."""
        ...


class OptimizerSteps:
    """The optimizers that have made steps, and who waits for the next one; both are kept weakly."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._is_following = False

    def follow(self) -> None:
        """Begins to note which optimizers make steps; idempotent."""
        if not self._is_following:
            self._is_following = True
            register_optimizer_step_post_hook(self._after_step)

    def seen(self) -> list[torch.optim.Optimizer]:
        """Returns the optimizers that have made a step and still exist, in any order."""
        return list(self._seen)

    def listen(self, listener: Listener) -> None:
        """Calls the listener after each step until `ignore` is called."""
        self._listeners.add(listener)

    def ignore(self, listener: Listener) -> None:
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
