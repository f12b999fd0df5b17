"""Trains one copy of a model on all ranks of a host and, for comparison, a replica on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline as dist
from paceline.train.shared_model import shared_model_optimizer as one_copy

ROUND_BYTES = 4096  # small, so that small models have several rounds


class Tied(nn.Module):
    """A network that uses a matrix twice, and has layers of two types, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.inner = nn.Linear(24, 24).double()
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.inner(self.embed(x).double()).float())).mean(1)


def build(kind: str = "mlp") -> nn.Module:
    torch.manual_seed(dist.get_rank())  # parameters differ between ranks until wrapping makes them equal
    if kind == "tied":
        return Tied()
    if kind == "cnn":
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 40)).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Linear(8, 65), nn.ReLU(), nn.Linear(65, 33), nn.ReLU(), nn.Linear(33, 40))


def batch(kind: str, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    target = torch.randint(0, 40, (6,), generator=generator)
    if kind == "tied":
        return torch.randint(0, 40, (6, 5), generator=generator), target
    return torch.randn((6, 1, 8, 8) if kind == "cnn" else (6, 8), generator=generator), target


def backward(model: nn.Module, kind: str, step: int) -> None:
    x, target = batch(kind, step, dist.get_rank())
    nn.functional.cross_entropy(model(x), target).backward()


def pair(
    kind: str, optimizer_class: type[torch.optim.Optimizer], round_bytes: int = ROUND_BYTES, **options: Any
) -> tuple[nn.Module, dist.SharedModelOptimizer, nn.Module, torch.optim.Optimizer]:
    """Returns a shared model and an identical model wrapped in DistributedDataParallel, with their optimizers."""
    torch.set_num_threads(1)
    one_copy.LEAST_ROUND_BYTES = round_bytes
    reference = dist.DistributedDataParallel(build(kind))
    model = copy.deepcopy(reference.module)
    shared = dist.SharedModelOptimizer(model, optimizer_class, **options)
    return model, shared, reference, optimizer_class(reference.parameters(), **options)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, steps: int = 4, before: Callable[[], object] = int
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, kind, step)
        before()
        optimizer.step()


def require_same(model: nn.Module, reference: nn.Module) -> None:
    """Asserts bitwise equality."""
    for name, mine in model.named_parameters():
        other = reference.get_parameter(name)
        assert torch.equal(mine, other), f"{name}: {(mine - other).detach().abs().max()}"


def require_close(model: nn.Module, reference: nn.Module) -> None:
    """Asserts that parameters are equal up to rounding."""
    for name, mine in model.named_parameters():
        torch.testing.assert_close(mine, reference.get_parameter(name), rtol=1e-5, atol=1e-6)
