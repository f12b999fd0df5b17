"""Models, batches and checks for the tests of data-parallel modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn

import paceline as dist


def batches(*shape: int, step: int = 0) -> list[torch.Tensor]:
    """Returns the batches of all ranks."""
    generators = (torch.Generator().manual_seed(1000 * step + rank) for rank in range(dist.get_world_size()))
    return [torch.randn(*shape, generator=generator) for generator in generators]


def mlp(depth: int = 3, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def require_equal_on_all_ranks(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def average_gradients(
    module: nn.Module, losses: Callable[[nn.Module], Iterable[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Returns the required gradients: the average over ranks, with one loss per rank in `losses(module)`."""
    reference = copy.deepcopy(module)
    sums: dict[str, torch.Tensor] = {}
    for loss in losses(reference):
        reference.zero_grad()
        loss.backward()
        for name, param in reference.named_parameters():
            if param.grad is not None:
                sums[name] = sums.get(name, torch.zeros_like(param)) + param.grad
    return {name: total / dist.get_world_size() for name, total in sums.items()}


def require_gradients(module: nn.Module, expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    for name, param in module.named_parameters():
        assert (param.grad is None) == (name not in expected), name
        if param.grad is not None:
            torch.testing.assert_close(
                param.grad.to_dense(), expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
