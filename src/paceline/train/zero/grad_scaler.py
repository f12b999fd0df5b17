"""GradScaler: loss scaling for models whose gradients are divided among ranks."""

from __future__ import annotations

from typing import Any

import torch

from paceline.comm.engine.codes import ReduceOp
from paceline.comm.group.default import Group, resolve
from paceline.train.zero.partitioned_optimizer import PartitionedOptimizer


class GradScaler(torch.amp.GradScaler):
    """Extends `torch.amp.GradScaler` to `SharedModelOptimizer` and stages 2 and 3 of `ZeroRedundancyOptimizer`.

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
        """Unscales the gradients if `unscale_` has not, and steps the optimizer if all ranks' gradients are finite."""
        if not isinstance(optimizer, PartitionedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer.is_scaled_alike = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer.is_scaled_alike = False  # the next step may use torch's scaler

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
