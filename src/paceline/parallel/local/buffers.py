"""Which buffers of a module are averaged with the last fragment, and which remain each rank's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def averaged_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers whose mean over the ranks means something: those with fractions that a state_dict has.

    A buffer that is not in the state_dict is computed anew by each rank, and a mean of counters would mean nothing.
    """
    kept = module.state_dict(keep_vars=True)
    found = {id(each): each for name, each in module.named_buffers() if name in kept and each.is_floating_point()}
    return list(found.values())


def other_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Returns the other buffers of the state_dict, such as counters, of which rank 0's become those of all."""
    kept, averaged = module.state_dict(keep_vars=True), {id(each) for each in averaged_buffers(module)}
    found = {id(each): each for name, each in module.named_buffers() if name in kept and id(each) not in averaged}
    return list(found.values())


def flat(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the values of buffers in a flat tensor of single precision on the CPU; double where one has that."""
    widest = torch.float64 if any(each.dtype == torch.float64 for each in buffers) else torch.float32
    parts = [each.detach().to("cpu", widest).reshape(-1) for each in buffers]
    return torch.cat(parts) if parts else torch.zeros(0)


@torch.no_grad()
def set_to(buffers: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Sets buffers to values in the form of `flat`."""
    at = 0
    for each in buffers:
        each.copy_(values[at : at + each.numel()].view(each.shape))
        at += each.numel()
