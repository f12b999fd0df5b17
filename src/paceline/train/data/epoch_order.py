"""The order in which an epoch goes through a dataset, and which rank takes which part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.utils.data import Dataset

Remainder = Literal["share", "repeat", "drop"]


class StepShard(NamedTuple):
    """What one rank takes in one step: `places` in the order of the epoch. After the step all ranks are at `end`."""

    places: tuple[int, ...]
    end: int


class BatchSharding(NamedTuple):
    """How the samples of a step are dealt out, for one rank.

    In a step the ranks take `num_replicas * batch_size` consecutive samples, rank 0 the first ones. The samples at the
    end that are too few for a step:

    - "share": are divided as evenly as possible; if there are fewer than ranks, the last ranks have no such step.
    - "repeat": are divided too, and ranks without one take a sample that another rank has as well.
    - "drop": are left out.
    """

    batch_size: int
    num_replicas: int
    rank: int
    remainder: Remainder

    @property
    def step(self) -> int:
        """The number of samples that all ranks take together in a whole step."""
        return self.num_replicas * self.batch_size

    def places(self, count: int) -> range:
        """Returns the places that this rank takes in a step of `count` samples, from 0 to `count` - 1.

        >>> [BatchSharding(2, 2, rank, "share").places(3) for rank in (0, 1)]
        [range(0, 2), range(2, 3)]
        """
        if count < self.step and self.remainder == "drop":
            return range(0)
        first, end = (_first_place(rank, count, self.num_replicas) for rank in (self.rank, self.rank + 1))
        if first == end and count and self.remainder == "repeat":
            first = self.rank % count
            end = first + 1
        return range(first, end)

    def batches(self, count: int) -> int:
        """Returns how many batches this rank takes of `count` samples."""
        return count // self.step + bool(self.places(count % self.step))

    def earliest(self, count: int) -> int:
        """Returns the first place that this rank may take in a step of `count` or more samples.

        It never decreases as `count` grows, so a rank that reads a step in order can let go of all places before it.
        """
        if self.remainder == "drop":
            return self.rank * self.batch_size
        if self.remainder == "repeat" and count < self.num_replicas:
            return 0
        return _first_place(self.rank, count, self.num_replicas)


def _first_place(rank: int, count: int, num_replicas: int) -> int:
    """Returns where a rank's part begins if `count` places are divided as evenly as possible."""
    each, more = divmod(count, num_replicas)
    return rank * each + min(rank, more)


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Returns the indices of an epoch, shuffled as torch's DistributedSampler does.

    >>> epoch_order(3, shuffle=False, seed=0, epoch=0)
    [0, 1, 2]
    """
    if not shuffle:
        return list(range(length))
    order: list[int] = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return order


def step_shards(position: int, length: int, deal: BatchSharding) -> Iterator[StepShard]:
    """Yields a rank's shares of the places from `position` to `length`.

    The position in an epoch is one number, whatever the number of ranks.

    >>> [share.places for share in step_shards(4, 11, BatchSharding(batch_size=2, num_replicas=2, rank=1, remainder="share"))]
    [(6, 7), (10,)]
    """
    for start in range(position, length, deal.step):
        count = min(deal.step, length - start)
        places = deal.places(count)
        if places:
            yield StepShard(tuple(start + place for place in places), start + count)


def length_of(dataset: Dataset[Any]) -> int:
    """Returns the number of samples; torch's type of a dataset does not say that it may have one.

    >>> length_of(range(3))
    3
    """
    return len(cast(Sized, dataset))
