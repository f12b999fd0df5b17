"""The ways to train the models of `bench/ddp.py`, step by step, on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from ddp import build
from torch import nn

import paceline as dist


class Repeated(torch.utils.data.Dataset[torch.Tensor]):
    """The samples of one step again and again; each shard has a batch of its own, derived from the given one."""

    def __init__(self, batch: torch.Tensor, steps: int, shards: int) -> None:
        self._step = torch.cat([batch.roll(shard, -1) for shard in range(shards)])
        self._count = steps * len(self._step)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._step[index % len(self._step)]


def model_and_samples(name: str, steps: int, shards: int) -> tuple[nn.Module, Repeated, int]:
    """Returns a model of `bench/ddp.py`, the samples of so many steps, and how many of them a shard takes in a step."""
    torch.manual_seed(0)
    model, batch = build(name)
    return model, Repeated(batch, steps, shards), len(batch)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-4)


def with_shards(
    model: nn.Module, shards: dist.LogicalShards, loader: dist.ShardLoader, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Trains an epoch; stops after the loader has yielded the next batches, and goes on for the rest of the step."""
    for batches in loader:
        yield
        optimizer.zero_grad()
        shards.backward(lambda inputs: model(inputs).mean(), batches)
        optimizer.step()


def with_ddp(model: nn.Module, samples: Repeated, batch_size: int) -> Iterator[None]:
    """Trains an epoch with DistributedDataParallel; stops like `with_shards`.

    Rank r takes the samples that shard r takes there.
    """
    wrapped = dist.DistributedDataParallel(model)
    yield from _epoch(wrapped, samples, batch_size, optimizer_of(model), int)


def with_barrier(model: nn.Module, samples: Repeated, batch_size: int) -> Iterator[None]:
    """Trains an epoch on the same samples, in which the workers only wait for each other after backward."""
    yield from _epoch(model, samples, batch_size, optimizer_of(model), dist.barrier)


def _epoch(
    model: nn.Module,
    samples: Repeated,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    before: Callable[[], object],
) -> Iterator[None]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    starts = range(rank * batch_size, len(samples), ranks * batch_size)
    order = [list(range(start, start + batch_size)) for start in starts]
    for inputs in torch.utils.data.DataLoader(samples, batch_sampler=order):
        yield
        optimizer.zero_grad()
        model(inputs).mean().backward()
        before()
        optimizer.step()
