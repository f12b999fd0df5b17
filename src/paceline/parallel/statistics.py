"""Means and variances of parts of a batch, and of the whole batch computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Statistics:
    """For each channel, in float64: the number of values, their mean, and the sum of squared distances from it."""

    count: float
    mean: torch.Tensor
    squares: torch.Tensor

    def pack(self) -> torch.Tensor:
        """Returns one tensor with all of it."""
        return torch.cat([self.mean.new_tensor([self.count]), self.mean, self.squares])

    @staticmethod
    def unpack(packed: torch.Tensor) -> Statistics:
        """Returns what `pack` packed."""
        mean, squares = packed[1:].chunk(2)
        return Statistics(float(packed[0]), mean, squares)


def measure(values: torch.Tensor) -> Statistics:
    """Returns the statistics of each channel, the second dimension."""
    count = values.numel() // values.shape[1]
    if count == 0:
        nothing = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
        return Statistics(0, nothing, nothing)
    by_channel = values.detach().transpose(0, 1).reshape(values.shape[1], -1).double()
    variance, mean = torch.var_mean(by_channel, 1, correction=0)
    return Statistics(count, mean, variance * count)


def combine(parts: Sequence[Statistics]) -> Statistics:
    """Returns the statistics of all values together (Chan, Golub and LeVeque 1979).

    >>> whole = combine([measure(torch.tensor([[1.0], [2.0]])), measure(torch.tensor([[6.0]]))])
    >>> whole.count, whole.mean.item(), whole.squares.item()
    (3.0, 3.0, 14.0)
    """
    count = float(sum(part.count for part in parts))
    total = torch.stack([part.mean * part.count for part in parts]).sum(0)
    mean = total / max(count, 1)
    squares = torch.stack([part.squares + part.count * (part.mean - mean) ** 2 for part in parts]).sum(0)
    return Statistics(count, mean, squares)
