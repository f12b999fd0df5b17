"""Training loops for the models of `bench/ddp.py`: shards, DistributedDataParallel, and no communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from ddp import build
from torch import nn

import paceline as dist


class Repeated(torch.utils.data.Dataset[torch.Tensor]):
    """The samples of one step, repeated in every step; each shard has its own batch, derived from the given batch."""

    def __init__(self, batch: torch.Tensor, steps: int, shards: int) -> None:
        self._step = torch.cat([batch.roll(shard, -1) for shard in range(shards)])
        self._count = steps * len(self._step)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._step[index % len(self._step)]


def model_and_samples(name: str, steps: int, shards: int) -> tuple[nn.Module, Repeated, int]:
    """Returns a model of `bench/ddp.py`, the samples for `steps` steps, and the number of samples per shard."""
    torch.manual_seed(0)
    model, batch = build(name)
    return model, Repeated(batch, steps, shards), len(batch)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-4)


def with_shards(
    model: nn.Module, shards: dist.LogicalShards, loader: dist.ShardLoader, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Trains for one epoch; yields after the loader has returned the next batches, then runs the rest of the step."""
    for batches in loader:
        yield
        optimizer.zero_grad()
        shards.backward(lambda inputs: model(inputs).mean(), batches)
        optimizer.step()


def with_ddp(model: nn.Module, samples: Repeated, batch_size: int) -> Iterator[None]:
    """Trains for one epoch with DistributedDataParallel; yields at the same points as `with_shards`.

    Rank r uses the samples that shard r has in `with_shards`.
    """
    wrapped = dist.DistributedDataParallel(model)
    yield from _epoch(wrapped, samples, batch_size, optimizer_of(model), int)


def with_barrier(model: nn.Module, samples: Repeated, batch_size: int) -> Iterator[None]:
    """Trains for one epoch on the same samples, with a barrier after each backward pass as the only communication."""
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
