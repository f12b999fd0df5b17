"""The gradients that a checkpoint of an elastic job must have: those that no optimizer has used yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paceline.parallel.gradient_use import is_pending


class PendingGradients:
    """Stands for the gradients of a module between the backwards of an accumulation; equal on all workers.

    Those that are left after an optimizer's step are not among them: the next accumulation begins without them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        """Returns the gradients by the names of the parameters; of one that is zero everywhere, the number 0."""
        pending = {name: param.grad for name, param in self.module.named_parameters() if is_pending(param)}
        return {name: 0 if _is_zero(each) else each for name, each in pending.items() if each is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor | int]) -> None:
        """Gives the parameters these gradients, and those that are not named none."""
        for name, param in self.module.named_parameters():
            found = state.get(name)
            if isinstance(found, torch.Tensor):
                found = found.to(param.device, copy=True)
            param.grad = torch.zeros_like(param) if isinstance(found, int) else found


def _is_zero(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and not gradient.any()
