"""FusedUpdates: optimizer updates in the C++ core, applied while the averages are in the first-level cache.

The core supports torch's Adam, AdamW and SGD with `fused=True`, whose rounding torch leaves to the implementation.
Torch remains responsible for their state: it creates the state in the first step, and saves and loads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline import _core
from paceline.comm.engine.codes import DTYPE_CODES
from paceline.train.shared_model.shared_shards import ReadyRound

_DTYPES = (torch.float32, torch.float64)
_address = torch.Tensor.data_ptr


class _Group(NamedTuple):
    """A parameter group's options in the current step, and the names of its parameters' state tensors."""

    options: _core.UpdateOptions
    state: Sequence[str]


class _Plan(NamedTuple):
    """The prepared update for a round; `tensors` keeps the memory at `addresses` alive."""

    update: _core.Update
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]


class FusedUpdates:
    """Creates updates with which the core applies `optimizer` to the slices in a round.

    Args:
        optimizer: an optimizer for the slices that this rank owns; its parameter groups must not change.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of = {
            id(updated): index for index, group in enumerate(optimizer.param_groups) for updated in group["params"]
        }
        self._plans: weakref.WeakKeyDictionary[ReadyRound, _Plan] = weakref.WeakKeyDictionary()
        self._groups: list[_Group] = []  # empty if torch must apply this step

    def begin_step(self) -> None:
        """Reads the parameter groups' options for this step."""
        groups = [_options_of(self._optimizer, group) for group in self._optimizer.param_groups]
        self._groups = [group for group in groups if group is not None] if all(groups) else []

    def begin(self, ready: ReadyRound) -> _core.Update | None:
        """Returns the update for the core to apply in this round, or None if torch must apply it."""
        tensors = self._tensors(ready) if self._groups else None
        if not tensors:
            return None
        plan = self._plans.get(ready)
        if plan is None or plan.addresses != list(map(_address, tensors)):
            if not self._are_usable(ready):
                return None
            plan = self._plans[ready] = self._plan(ready, tensors)
        plan.update.begin([group.options for group in self._groups])
        return plan.update

    def _tensors(self, ready: ReadyRound) -> list[torch.Tensor] | None:
        """Returns the updated tensors, each followed by its state, or None if torch has not created all state yet."""
        tensors: list[torch.Tensor] = []
        for updated, _ in ready.averages:
            tensors.append(updated)
            names = self._groups[self._group_of[id(updated)]].state
            if names:
                state = self._optimizer.state.get(updated, {})
                tensors += [tensor for name in names if (tensor := state.get(name)) is not None]
                if not all(name in state for name in names):
                    return None
        return tensors

    def _are_usable(self, ready: ReadyRound) -> bool:
        """Returns whether the core supports the dtypes and layouts of this round's state."""
        for updated, _ in ready.averages:
            state = self._optimizer.state.get(updated, {})
            for name in self._groups[self._group_of[id(updated)]].state:
                tensor = state[name]
                is_usable = (
                    tensor.dtype is torch.float32
                    if name == "step"
                    else tensor.dtype is updated.dtype and tensor.stride() == updated.stride()
                )
                if not is_usable or not tensor.is_cpu:
                    return False
        return ready.sums.dtype in _DTYPES

    def _plan(self, ready: ReadyRound, tensors: Sequence[torch.Tensor]) -> _Plan:
        addresses = list(map(_address, tensors))
        runs, start = [], 0
        for updated, _ in ready.averages:
            group = self._group_of[id(updated)]
            width = 1 + len(self._groups[group].state)
            param, first, second, steps = (*addresses[start : start + width], 0, 0, 0)[:4]
            runs.append((param, first, second, steps, updated.nbytes, group))
            start += width
        return _Plan(_core.Update(DTYPE_CODES[ready.sums.dtype], runs), tensors, addresses)


def _options_of(optimizer: Optimizer, group: Mapping[str, Any]) -> _Group | None:
    """Converts a parameter group's options for the core; returns None if the core does not support them."""
    if not group.get("fused") or group.get("amsgrad"):
        return None
    lr, weight_decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
    if type(optimizer) in (Adam, AdamW):
        beta1, beta2 = (float(beta) for beta in group["betas"])
        options = _core.adam_options(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            is_decoupled=bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW)),
        )
        return _Group(options, ("exp_avg", "exp_avg_sq", "step"))
    if type(optimizer) is SGD:
        momentum = float(group["momentum"])
        options = _core.sgd_options(
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            momentum=momentum,
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
        )
        return _Group(options, ("momentum_buffer",) if momentum else ())
    return None
