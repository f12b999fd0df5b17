"""Gradient clipping (`clip_grad_norm_`) and loss scaling (`GradScaler`) for models divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.default import Group, resolve
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.tensor.layers import slice_of
from paceline.train.zero.gradient_reducer import clip, norm_powers, reduce_powers
from paceline.train.zero.partitioned_optimizer import PartitionedOptimizer


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pipeline_group: Group = None,
) -> torch.Tensor:
    """Clips gradients by the norm of the whole model's gradients. All ranks that hold parts of the model must call it.

    Args:
        parameters: this rank's parameters. For parameters that `parallelize_module` divided, all ranks' parts
            contribute to the norm; other parameters are counted once.
        max_norm: the maximum norm after clipping.
        norm_type: the order of the norm, 2.0 by default; `inf` for the maximum norm.
        error_if_nonfinite: whether a NaN or infinite norm raises an error.
        pipeline_group: the ranks that hold the stages of a `Pipeline`, such as `mesh.get_group("pp")`.

    Returns:
        The norm before clipping, a scalar on the first gradient's device.

    Raises:
        RuntimeError: the norm is NaN or infinite, and `error_if_nonfinite` is set.
    """
    by_group: dict[ProcessGroup | None, list[torch.Tensor]] = {None: []}
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        own = slice_of(parameter)
        gradients = by_group.setdefault(None if own is None else own.group, [])
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for group, gradients in by_group.items():
        powers = norm_powers(gradients, norm_type, total.device)
        if group is not None:
            reduce_powers(powers, norm_type, group)
        total = torch.maximum(total, powers) if norm_type == float("inf") else total + powers
    if (stages := None if pipeline_group is None else resolve(pipeline_group)) is not None:
        reduce_powers(total, norm_type, stages)
    norm = total if norm_type == float("inf") else total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {norm.item()}; with error_if_nonfinite=False they would be "
            "scaled by it"
        )
    clip(chain.from_iterable(by_group.values()), norm, max_norm)
    first = next((gradient for gradients in by_group.values() for gradient in gradients), total)
    return norm.to(first.device, first.dtype)


class GradScaler(torch.amp.GradScaler):
    """Extends `torch.amp.GradScaler` to support `SharedModelOptimizer` and `ZeroRedundancyOptimizer` (stages 2 and 3).

    With these optimizers, each rank unscales the gradients that it owns. The ranks then agree on whether any gradient
    is infinite or NaN; they therefore skip the same steps and keep the same scale.

    Args:
        device: the device of the scale; "cpu" by default.
        init_scale: the initial scale; 65536 by default.
        growth_factor: the factor by which the scale grows after `growth_interval` steps without infinities.
        backoff_factor: the factor by which the scale shrinks after a step with infinities.
        growth_interval: the number of steps without infinities after which the scale grows.
        enabled: whether to scale losses and gradients.
        group: the ranks that hold different parts of one model, as with `Pipeline` or `parallelize_module`. These ranks
            then agree on skipped steps with any optimizer. None if each rank holds the whole model.

    Example::

        scaler = paceline.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        group: Group = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = None if group is None else resolve(group)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients if necessary; steps the optimizer if the gradients of all ranks are finite."""
        if not isinstance(optimizer, PartitionedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer.is_scaled_alike = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer.is_scaled_alike = False  # the next step may be made with torch's scaler

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        groups = [] if self._group is None else [self._group]
        own_part = optimizer
        if isinstance(optimizer, PartitionedOptimizer) and optimizer.owns_gradients:
            groups.append(optimizer.process_group)
            own_part = optimizer.own_part()
        found = super()._unscale_grads_(own_part, inv_scale, found_inf, allow_fp16)
        if not groups:
            return found
        anywhere = torch.stack([found_inf, *found.values()]).max()
        for group in groups:
            group.all_reduce(anywhere, ReduceOp.MAX)
        return {found_inf.device: anywhere}
