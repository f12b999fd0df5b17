"""Which samples each shard has in each step of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.parallel.sharded.streams import random_stream
from paceline.parallel.sharded.tree import run_of_rank

_ORDER = 0  # the purpose of a random stream


@dataclass(frozen=True)
class EpochPlan:
    """The samples of an epoch in its order, and how steps and shards divide them.

    Attributes:
        epoch: the epoch.
        order: the samples.
        shards: the number of logical shards.
        batch_size: the number of samples of each shard in a step.
    """

    epoch: int
    order: torch.Tensor
    shards: int
    batch_size: int

    @classmethod
    def of(cls, epoch: int, samples: int, shards: int, batch_size: int, *, seed: int, shuffle: bool) -> EpochPlan:
        """Returns the plan of an epoch of so many samples, which is the same on every rank."""
        order = torch.arange(samples)
        if shuffle:
            with random_stream(seed, _ORDER, epoch):
                order = torch.randperm(samples)
        return cls(epoch, order, shards, batch_size)

    def samples_of_step(self, step: int) -> int:
        """Returns the number of samples of all shards in a step."""
        whole = self.shards * self.batch_size
        return min(whole, len(self.order) - step * whole)

    def samples_of(self, step: int, shard: int) -> list[int]:
        """Returns the samples of a shard in a step; none if the last step has fewer samples than shards."""
        first = step * self.shards * self.batch_size
        run = run_of_rank(self.samples_of_step(step), self.shards, shard)
        listed: list[int] = self.order[first + run.start : first + run.stop].tolist()
        return listed

    def count_of(self, step: int, shard: int) -> int:
        """Returns the number of samples of a shard in a step."""
        return len(run_of_rank(self.samples_of_step(step), self.shards, shard))

    def batches(self, steps: range, mine: range) -> Iterator[list[Any]]:
        """Yields what some shards read in some steps: (epoch, step, shard), and then the samples."""
        for step in steps:
            for shard in mine:
                if samples := self.samples_of(step, shard):
                    yield [(self.epoch, step, shard), *samples]
