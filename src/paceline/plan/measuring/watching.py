"""Watches a script's steps from outside: hooks on its modules, parameters, optimizers and loaders note the times.

In the first step every module's forward is watched, to find the outermost ones with parameters: a
`DistributedDataParallel`, or the model itself. From then on only these are, so that the hooks cost a few microseconds a
step, and a microsecond for each parameter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from paceline.parallel.graph import find_tensors
from paceline.plan.measuring.notes import StepNotes

_BEFORE_SETTLED = 2  # steps of an optimizer in which the modules are looked for, and what they make is allocated


class StepWatch:
    """Notes the steps of this process from now on, until `close`.

    Args:
        after_step: is called after each step of the script, with the steps so far; the modules, if they are known.
        clock: returns seconds.
    """

    def __init__(self, after_step: Callable[[StepWatch], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[StepNotes] = []
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._after_step = after_step
        self._clock = clock
        self._notes = StepNotes(clock())
        self._depth = 0
        self._seen = 0
        self._forward_began = self._backward_began = self._latest_ready = self._optimizer_began = 0.0
        self._in_backward = False
        self._handles: list[Any] = [
            optimizers.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizers.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._finding: list[Any] = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]
        self._next = dataloader._BaseDataLoaderIter.__next__
        dataloader._BaseDataLoaderIter.__next__ = self._timed_next()  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Takes all hooks off; idempotent."""
        for handle in (*self._finding, *self._handles):
            handle.remove()
        self._finding, self._handles = [], []
        dataloader._BaseDataLoaderIter.__next__ = self._next  # type: ignore[method-assign]

    # - Finding the modules

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and module not in self.roots and _trains(module):
            self.roots.append(module)

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _settle(self) -> None:
        """Watches the modules that were found, and no others any more."""
        for handle in self._finding:
            handle.remove()
        self._finding = []
        for module in self.roots:
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                module.register_forward_hook(self._after_forward),
            ]
            for name, param in module.named_parameters():
                if param.requires_grad:
                    self._handles.append(param.register_post_accumulate_grad_hook(partial(self._arrive, name)))

    # - A step

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._end_backward()
            self._forward_began = self._clock()
            first = next((each for each in find_tensors((args, kwargs)) if each.dim() > 0), None)
            if first is not None and module is self.roots[0]:
                self._notes.samples += first.shape[0]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or not self._forward_began:
            return
        self._notes.forward_s.append(self._clock() - self._forward_began)
        self._forward_began = 0.0
        for tensor in find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._backward_began = self._latest_ready = self._clock()

    def _arrive(self, name: str, param: torch.Tensor) -> None:
        self._begin_backward(param)
        self._latest_ready = self._clock()
        self._notes.ready_s[name] = self._latest_ready - self._backward_began

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._notes.backward_s.append(self._latest_ready - self._backward_began)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._end_backward()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self._optimizer_began = self._clock()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        now = self._clock()
        self._notes.optimizer_s += now - self._optimizer_began
        if optimizer is not self.optimizers[0]:
            return
        self._seen += 1
        if self._finding:
            if self._seen >= _BEFORE_SETTLED and self.roots:
                self._settle()
        else:
            self._notes.end_s = now
            self.steps.append(self._notes)
            self._after_step(self)
        self._notes = StepNotes(self._clock())

    def _timed_next(self) -> Callable[[Any], Any]:
        following = self._next

        def timed(loader: Any) -> Any:
            began = self._clock()
            try:
                return following(loader)
            finally:
                self._notes.data_s += self._clock() - began

        return timed


def _trains(module: nn.Module) -> bool:
    return module.training and any(param.requires_grad for param in module.parameters())
