"""Lion: the "evolved sign momentum" optimizer (Chen et al. 2023), which torch does not include."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Implements Lion, which changes each element by the learning rate; the sign of a momentum gives the direction.

    The update is elementwise. The state consists of one number for each element, half as many as in Adam.

    Args:
        params: the parameters or parameter groups.
        lr: the learning rate; good values are 3 to 10 times smaller than for AdamW.
        betas: the momentum coefficients; the first is used for the direction of the update, the second for the running
            average.
        weight_decay: the decoupled weight decay; good values are 3 to 10 times larger than for AdamW.

    Raises:
        ValueError: an argument is out of range.

    Example::

        optimizer = paceline.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion got lr={lr}, betas={betas} and weight_decay={weight_decay}; lr and weight_decay must not be "
                "negative, and betas must be at least 0 and below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters; first calls `closure`, if given, to compute the loss and the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, param.grad, group)
        return loss

    def _move(self, param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        momentum: torch.Tensor = state["exp_avg"]
        of_direction, of_momentum = group["betas"]
        direction = momentum.lerp(gradient, 1 - of_direction).sign_()
        if group["weight_decay"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - of_momentum)
