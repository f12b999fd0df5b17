"""Loads the state of an optimizer with the bits that it had."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

_STEP = "step"  # of which torch itself keeps the type


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads what `state_dict` returned; scalars keep the types that they have there.

    Torch gives all but the number of steps the type of the parameter, and so rounds the float32 scalars of NAdam and
    ASGD where that is bfloat16.
    """
    optimizer.load_state_dict(state)
    if "param_groups" not in state or not isinstance(state.get("state"), Mapping):
        return  # an optimizer of others may have a state of its own kind
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, param in zip(numbers, params, strict=False):
        saved, own = state["state"].get(number), optimizer.state.get(param)
        if isinstance(saved, Mapping) and isinstance(own, dict):
            for key, value in saved.items():
                loaded = own.get(key)
                if key == _STEP or not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                    continue
                if value.dim() == 0 and value.dtype != loaded.dtype:
                    own[key] = value.to(loaded.device, copy=True)
