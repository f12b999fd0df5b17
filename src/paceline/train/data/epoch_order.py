"""The order of an epoch's samples, their division among ranks, and the samples that remain.

All functions in this module are pure. Every rank computes the same results, so the ranks agree without communication.
In an elastic job, the set of ranks may change between two batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch.utils.data import Dataset

Remainder = Literal["share", "repeat", "drop"]


class StreamPosition(NamedTuple):
    """A position in a stream's epoch (the number of samples before it), and optionally the stream's own state."""

    position: int
    state: Any = None


class StepShard(NamedTuple):
    """The `places` that one rank reads in a step, in epoch order; `end` is the first place after the whole step."""

    places: tuple[int, ...]
    end: int


class BatchSharding(NamedTuple):
    """The division of a step's samples among ranks, and the index of the rank that uses this object.

    A step consists of `num_replicas * batch_size` consecutive samples, which are assigned to the ranks in order. If too
    few samples remain for a full step, `remainder` determines what happens to them:

    - "share": The samples are divided as evenly as possible. Ranks without a sample skip the step.
    - "repeat": The samples are divided as with "share", and each rank without a sample repeats another rank's sample.
    - "drop": The samples are skipped.
    """

    batch_size: int
    num_replicas: int
    rank: int
    remainder: Remainder

    @property
    def step(self) -> int:
        """The number of samples in a full step, over all ranks."""
        return self.num_replicas * self.batch_size

    def places(self, count: int) -> range:
        """Returns this rank's places in a step of `count` samples; places are numbered from 0 to `count` - 1.

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
        """Returns the number of batches that this rank reads from `count` samples."""
        return count // self.step + bool(self.places(count % self.step))

    def earliest(self, count: int) -> int:
        """Returns the first place that this rank may need in a step of `count` or more samples.

        The result never decreases as `count` grows, so a rank that reads a step in order can discard earlier places.
        """
        if self.remainder == "drop":
            return self.rank * self.batch_size
        if self.remainder == "repeat" and count < self.num_replicas:
            return 0
        return _first_place(self.rank, count, self.num_replicas)


def _first_place(rank: int, count: int, num_replicas: int) -> int:
    """Returns the first place of a rank's part if `count` places are divided as evenly as possible."""
    least, larger = divmod(count, num_replicas)
    return rank * least + min(rank, larger)


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Returns the sample indices of an epoch, shuffled as in torch's DistributedSampler.

    >>> epoch_order(3, shuffle=False, seed=0, epoch=0)
    [0, 1, 2]
    """
    if not shuffle:
        return list(range(length))
    order: list[int] = torch.randperm(
        length, generator=torch.Generator().manual_seed(seed + epoch), device="cpu"
    ).tolist()
    return order


def step_shards(position: int, length: int, sharding: BatchSharding) -> Iterator[StepShard]:
    """Yields a rank's shard of each step from place `position` to `length`.

    >>> [shard.places for shard in step_shards(4, 11, BatchSharding(2, num_replicas=2, rank=1, remainder="share"))]
    [(6, 7), (10,)]
    """
    for start in range(position, length, sharding.step):
        count = min(sharding.step, length - start)
        places = sharding.places(count)
        if places:
            yield StepShard(tuple(start + place for place in places), start + count)


def length_of(dataset: Dataset[Any]) -> int:
    """Returns the length of a dataset; torch's `Dataset` type does not declare `__len__`."""
    return len(cast(Sized, dataset))


@dataclass(frozen=True)
class RemainingSamples:
    """The unused places in an epoch: those in `range(position, length)`, followed by returned places.

    >>> rest = RemainingSamples(position=6, length=8, returned=(2, 3))
    >>> rest.places(1, 4), rest.after(3)
    ([7, 2, 3], RemainingSamples(position=8, length=8, returned=(3,)))
    """

    position: int
    length: int
    returned: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.length - self.position + len(self.returned)

    def place(self, index: int) -> int:
        """Returns the place at `index`.

        >>> rest = RemainingSamples(position=6, length=8, returned=(2, 3))
        >>> [rest.place(index) for index in range(len(rest))]
        [6, 7, 2, 3]
        """
        ahead = self.length - self.position
        return self.position + index if index < ahead else self.returned[index - ahead]

    def places(self, first: int, end: int) -> list[int]:
        """Returns a slice of the places."""
        ahead = self.length - self.position
        fresh = range(self.position, self.length)[first:end]
        return [*fresh, *self.returned[max(0, first - ahead) : max(0, end - ahead)]]

    def after(self, count: int) -> RemainingSamples:
        """Returns the places that remain after the first `count`."""
        ahead = self.length - self.position
        return RemainingSamples(self.position + min(count, ahead), self.length, self.returned[max(0, count - ahead) :])


class ReadBatch(NamedTuple):
    """This rank's batch in a step; together, all ranks use the first `used` places of `before`.

    `bookmark` is a position in the stream at or before the step.
    """

    batch: Any
    bookmark: StreamPosition
    before: RemainingSamples
    used: int


class RankSlot(NamedTuple):
    """A rank's slot among the `ranks` that share a batch; `rank` is None if the rank joined too late for the batch."""

    ranks: int
    rank: int | None


@dataclass(frozen=True)
class EpochStep:
    """A step: the first `count` places of `before`, divided among `ranks` ranks."""

    before: RemainingSamples
    ranks: int
    count: int

    def places_of(self, rank: int) -> list[int]:
        """Returns the places that are assigned to a rank, excluding places that the rank only repeats.

        >>> step = EpochStep(RemainingSamples(4, 9), ranks=3, count=2)
        >>> [step.places_of(rank) for rank in range(3)]
        [[4], [5], []]
        """
        run = BatchSharding(1, self.ranks, rank, "share").places(self.count)
        return self.before.places(run.start, run.stop)


def sharding_for(slot: RankSlot, batch_size: int, remainder: Remainder) -> BatchSharding:
    """Returns a rank's sharding in an elastic job; unless samples are dropped, every rank has a batch in every step."""
    return BatchSharding(batch_size, slot.ranks, slot.rank or 0, "drop" if remainder == "drop" else "repeat")


class BatchAssigner(Protocol):
    """Interface for objects that select the ranks for each batch in an elastic job, where the ranks may change."""

    def begin_batch(self) -> RankSlot:
        """Returns this rank's slot in the next batch."""
        ...

    def batch_delivered(self, *, counts: bool) -> None:
        """Runs before the training loop receives a batch; `counts` is False if the samples belong to another rank."""
        ...

    def end_batch(self) -> None:
        """Runs when the training loop requests the next batch."""
        ...
