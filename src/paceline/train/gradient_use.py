"""Marks gradients that an optimizer step has used. Unmarked gradients are pending, for example during accumulation.

After each optimizer step, an attribute of each gradient records the tensor version that the optimizer used. A later
backward pass either accumulates into the gradient, which increments its version, or creates a new, unmarked gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from paceline.train.zero.partitioned_optimizer import PartitionedOptimizer

_USED = "_paceline_used"


class GradientUse:
    """Marks gradients as used, with a step hook that runs for all optimizers in this process."""

    def __init__(self) -> None:
        self._is_following = False
        self.has_seen_step = False  # whether an optimizer has stepped since the first call to `follow`

    def follow(self) -> None:
        """Starts marking the gradients that optimizers use; idempotent."""
        if not self._is_following:
            self._is_following = True
            optimizers.register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.has_seen_step = True
        for group in optimizer.param_groups:
            mark_used(group["params"])
        if isinstance(optimizer, PartitionedOptimizer):
            mark_used(holder for _, holder in optimizer.gradient_holders())


GRADIENT_USE = GradientUse()


def mark_used(params: Iterable[torch.Tensor]) -> None:
    """Marks the gradients of `params` as used."""
    for param in params:
        gradient = param.grad
        if gradient is not None:
            setattr(gradient, _USED, _version(gradient))


def is_pending(param: torch.Tensor) -> bool:
    """Returns True if an optimizer step has not used the parameter's gradient since the first call to `follow`."""
    gradient = param.grad
    return gradient is not None and getattr(gradient, _USED, None) != _version(gradient)


def _version(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else gradient._version
