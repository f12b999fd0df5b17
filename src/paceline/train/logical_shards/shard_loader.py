"""ShardLoader: loads batches for logical shards, independently of the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch.utils.data import DataLoader, default_collate

from paceline.comm.record.spans import recorded_waits
from paceline.train.logical_shards.logical_shards import LogicalShards
from paceline.train.logical_shards.shard_batches import READING, EpochPlan, ShardBatch, StepBatches, random_stream


class Indexed(Protocol):
    """A dataset with a length that can be indexed."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Returns a sample."""


class ShardLoader:
    """Yields a list of the batches of this rank's shards (`ShardBatch`) in each step.

    The samples of a shard in a step depend on the number of shards, but not on the number of ranks. The last step of an
    epoch divides the remaining samples among all shards; shards without a sample have no batch. Samples are read with
    the random stream of their shard and step, so augmentation does not depend on the number of ranks or workers either.
    Each iteration is an epoch, or the rest of one.

    Args:
        dataset: a dataset with a length that can be indexed.
        batch_size: the number of samples of each shard in a step.
        shards: the logical shards.
        shuffle: whether the samples are permuted, differently in each epoch.
        num_workers, collate_fn, prefetch_factor, persistent_workers: the arguments of torch's DataLoader.

    Example::

        loader = paceline.ShardLoader(dataset, batch_size=4, shards=shards)
    """

    def __init__(
        self,
        dataset: Indexed,
        batch_size: int,
        shards: LogicalShards,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self.epoch = 0
        self._next_step = 0
        self._dataset, self._batch_size, self._shards, self._shuffle = dataset, batch_size, shards, shuffle
        self._plan: EpochPlan | None = None  # of the latest epoch
        self._collate: Callable[[list[Any]], Any] = default_collate if collate_fn is None else collate_fn
        self._reading = _Reading(dataset, shards.seed)
        reading: Any = self._reading  # has a Dataset's methods, but not its base class
        self._upcoming = _Batches()
        self._loader: DataLoader[Any] = DataLoader(
            reading,
            batch_sampler=self._upcoming,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )

    def __iter__(self) -> Iterator[StepBatches]:
        """Yields the remaining steps of the epoch."""
        while self._next_step < self._steps():
            yield from self._steps_as_dealt()
        self._shards.begin_batch()
        self.epoch += 1
        self._next_step = 0

    def whole_epoch(self) -> Iterator[StepBatches]:
        """Yields all steps of epoch 0, for an evaluation, and then restores the position.

        Raises:
            ValueError: an epoch has begun but not ended, or there are fewer samples than shards.
        """
        if self._next_step:
            raise ValueError(
                f"the loader is in step {self._next_step} of epoch {self.epoch}; evaluate with a loader of its own"
            )
        if len(self._dataset) < self._shards.count:
            raise ValueError(
                f"{len(self._dataset)} samples cannot be evaluated in {self._shards.count} shards; each needs one"
            )
        epoch, self.epoch = self.epoch, 0
        try:
            yield from self._remaining(self._shards.mine)
        finally:
            self.epoch, self._next_step = epoch, 0

    def __len__(self) -> int:
        """Returns the number of remaining steps of the epoch, which is the same on every rank."""
        return self._steps() - self._next_step

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the steps that have been yielded so far."""
        return {"epoch": self.epoch, "step": self._next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the position in `state`, on any number of ranks, for the same number of shards and batch size."""
        self.epoch, self._next_step = state["epoch"], state["step"]

    def _steps(self) -> int:
        return -(-len(self._dataset) // (self._shards.count * self._batch_size))

    def _plan_of(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch, which is cached."""
        if self._plan is None or (self._plan.epoch, len(self._plan.order)) != (epoch, len(self._dataset)):
            samples, shards = len(self._dataset), self._shards
            self._plan = EpochPlan.of(
                epoch, samples, shards.count, self._batch_size, seed=shards.seed, shuffle=self._shuffle
            )
        return self._plan

    def _steps_as_dealt(self) -> Iterator[StepBatches]:
        """Yields the remaining steps of the epoch until this rank gets other shards."""
        mine = self._shards.mine
        remaining = self._remaining(mine)
        while self._next_step < self._steps():
            self._shards.begin_batch()
            if self._shards.mine != mine:
                return  # the loader has read ahead for other shards
            yield next(remaining)

    def _remaining(self, mine: range) -> Iterator[StepBatches]:
        plan, steps = self._plan_of(self.epoch), self._steps()
        # The generator is lazy: an elastic job continues in a new view without waiting for a list of all batches.
        self._upcoming.listed = plan.batches(range(self._next_step, steps), mine)
        # A rank without shards, such as a worker that catches up with others, starts no loader processes.
        batches = recorded_waits(iter(self._loader) if mine else iter(()), "ShardLoader")
        while self._next_step < steps:
            step = self._next_step
            self._next_step = step + 1
            keys = [(plan.epoch, step, shard) for shard in mine if plan.count_of(step, shard)]
            yield StepBatches(
                [self._batch(plan, key, next(batches)) for key in keys], partial(self._read_in, plan, step)
            )

    def _read_in(self, plan: EpochPlan, step: int, shard: int) -> ShardBatch | None:
        """Reads a shard's batch of a step in this process; returns None if it has no samples."""
        key, samples = (plan.epoch, step, shard), plan.samples_of(step, shard)
        if not samples:
            return None
        return self._batch(plan, key, self._collate(self._reading.__getitems__([key, *samples])))

    def _batch(self, plan: EpochPlan, key: tuple[int, int, int], data: Any) -> ShardBatch:
        return ShardBatch(key, plan.count_of(*key[1:]) / plan.samples_of_step(key[1]), data)


class _Batches:
    """Yields each batch to the DataLoader as its key followed by its indices.

    It holds no reference to the loader: in a reference cycle, the garbage collector would end the loader's processes,
    which takes five seconds for each.
    """

    def __init__(self) -> None:
        self.listed: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.listed


class _Reading:
    """Reads the dataset batch by batch, each in the random stream of its key."""

    def __init__(self, dataset: Indexed, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keyed: Sequence[Any]) -> list[Any]:
        key, *indices = keyed
        with random_stream(self._seed, READING, *key):
            return [self._dataset[index] for index in indices]
