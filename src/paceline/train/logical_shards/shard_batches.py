"""Samples, batches and random streams of logical shards; all are independent of the rank that computes a shard."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.train.logical_shards.tree_sum import run_of_rank

# A random stream's key starts with the seed and one of these purposes. Changing a value changes training results.
ORDER, READING, TRAINING, FORWARD, EVALUATION = range(5)


class Batch(Protocol):
    """Interface for a shard's batch, such as the `ShardBatch` objects from a `ShardLoader`."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The epoch number, the step number and the shard number."""

    @property
    def weight(self) -> float:
        """The batch's share of the step's samples, from 0 to 1."""

    @property
    def data(self) -> Any:
        """The data from which the loss is computed."""


@dataclass(frozen=True)
class ShardBatch:
    """A shard's batch in one step; see `Batch`."""

    key: tuple[int, int, int]
    weight: float
    data: Any


class StepBatches(list[ShardBatch]):
    """The batches of this rank's shards in one step; shards without samples are omitted.

    `read` reads the batch of any shard in this step, or returns None if the shard has no samples.
    """

    def __init__(self, batches: Iterable[ShardBatch], read: Callable[[int], ShardBatch | None]) -> None:
        super().__init__(batches)
        self._own: dict[int, ShardBatch] = {batch.key[2]: batch for batch in self}
        self._read = read

    def without_data(self) -> StepBatches:
        """Returns a copy without the batches, to free their memory; `of` reads batches again on demand."""
        return StepBatches([], self._read)

    def of(self, shard: int) -> ShardBatch | None:
        """Returns a shard's batch, or None if the shard has no samples. Reads the batch if it is not in this list."""
        return self._own[shard] if shard in self._own else self._read(shard)


@contextmanager
def random_stream(*key: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Returns a context in which torch and `random` draw from the stream for `key`; their states are restored on exit.

    `devices` are those, other than the CPU, whose generators also draw from the stream.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    modules = [torch.get_device_module(device) for device in devices]
    device_states = [of.get_rng_state(device) for of, device in zip(modules, devices, strict=True)]
    torch.default_generator.manual_seed(seed)
    random.seed(digest)
    for of, device in zip(modules, devices, strict=True):
        of.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        for of, device, state in zip(modules, devices, device_states, strict=True):
            of.set_rng_state(state, device)


@dataclass(frozen=True)
class EpochPlan:
    """The order of samples in an epoch, and their division into steps and shards."""

    epoch: int
    order: torch.Tensor  # the indices of the samples, in the order of training
    shards: int
    batch_size: int  # the number of samples per shard in a step

    @classmethod
    def of(cls, epoch: int, samples: int, shards: int, batch_size: int, *, seed: int, shuffle: bool) -> EpochPlan:
        """Creates the plan for an epoch of `samples` samples; the plan is the same on every rank."""
        order = torch.arange(samples, device="cpu")
        if shuffle:
            with random_stream(seed, ORDER, epoch):
                order = torch.randperm(samples, device="cpu")
        return cls(epoch, order, shards, batch_size)

    def samples_of_step(self, step: int) -> int:
        """Returns the number of samples in a step, over all shards."""
        whole = self.shards * self.batch_size
        return min(whole, len(self.order) - step * whole)

    def samples_of(self, step: int, shard: int) -> list[int]:
        """Returns a shard's samples in a step; in the last step, some shards may have none."""
        first = step * self.shards * self.batch_size
        run = run_of_rank(self.samples_of_step(step), self.shards, shard)
        listed: list[int] = self.order[first + run.start : first + run.stop].tolist()
        return listed

    def count_of(self, step: int, shard: int) -> int:
        """Returns the number of samples that a shard has in a step."""
        return len(run_of_rank(self.samples_of_step(step), self.shards, shard))

    def batches(self, steps: range, mine: range) -> Iterator[list[Any]]:
        """Yields one list per step and shard: the key (epoch, step, shard), followed by the sample indices."""
        for step in steps:
            for shard in mine:
                if samples := self.samples_of(step, shard):
                    yield [(self.epoch, step, shard), *samples]
