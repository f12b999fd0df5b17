"""Optimizers that step inside backward and free each gradient immediately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.comm.group.eager import eager

_OPTIMIZERS = "_in_backward_optimizers"  # the attribute that torch's _apply_optimizer_in_backward also sets
_HOOK = "_paceline_step_hook"


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Gives each parameter its own optimizer, which steps inside backward and frees the gradient immediately.

    If the module is wrapped in `DistributedDataParallel` afterward, the optimizers step when backward ends, with the
    averaged gradients; backward passes within `no_sync` only accumulate gradients. Do not call `step` or `zero_grad`.

    Args:
        optimizer_class: the class of the optimizers; it is called with a list of one parameter and `optimizer_kwargs`.
        params: parameters that require gradients, from a module that is not wrapped yet.
        optimizer_kwargs: the keyword arguments for the optimizers, such as `{"lr": 0.1}`.

    Raises:
        ValueError: a parameter already has an optimizer that steps inside backward.
    """
    for param in params:
        if hasattr(param, _OPTIMIZERS):
            raise ValueError(
                f"a parameter of shape {list(param.shape)} has an optimizer in backward already, and can have only one"
            )
        setattr(param, _OPTIMIZERS, [optimizer_class([param], **dict(optimizer_kwargs or {}))])
        setattr(param, _HOOK, param.register_post_accumulate_grad_hook(_step))


def take_over_steps(params: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Disables stepping inside backward, and returns the parameters that have optimizers.

    The caller must step these optimizers with `step_params`.
    """
    stepped = []
    for name, param in params.items():
        if not hasattr(param, _OPTIMIZERS):
            continue
        if not hasattr(param, _HOOK):
            raise TypeError(
                f"parameter {name!r} has an optimizer in backward that would step before gradients are averaged; "
                "install it with paceline.apply_optimizer_in_backward instead"
            )
        getattr(param, _HOOK).remove()
        stepped.append(param)
    return stepped


def step_params(params: Iterable[nn.Parameter]) -> None:
    """Steps the in-backward optimizers of these parameters and frees the gradients."""
    for param in params:
        _step(param)


@torch.no_grad()
@eager
def _step(param: torch.Tensor) -> None:
    if param.grad is not None:
        for optimizer in getattr(param, _OPTIMIZERS):
            optimizer.step()
        param.grad = None
