"""ShardLoader: loads batches for logical shards, independently of the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch.utils.data import DataLoader, default_collate

from paceline.comm.record.spans import recorded_waits
from paceline.train.logical_shards.logical_shards import LogicalShards
from paceline.train.logical_shards.shard_batches import READING, EpochPlan, ShardBatch, StepBatches, random_stream


class IndexedDataset(Protocol):
    """Interface for indexable datasets with a length."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Returns the sample at `index`."""


class ShardLoader:
    """Yields, for each step, a list with a `ShardBatch` for each of this rank's shards.

    A shard's samples depend on the number of shards, but not on the number of ranks. The last step of an epoch divides
    the remaining samples among all shards; shards without samples have no batch. Each batch is read with its own random
    stream, so augmentation does not depend on the number of ranks or workers. Each iteration over the loader is an
    epoch or, after `load_state_dict`, the rest of an epoch.

    Args:
        dataset: an indexable dataset with a length.
        batch_size: the number of samples per shard in a step.
        shards: the logical shards.
        shuffle: whether the samples are permuted, differently in each epoch.
        num_workers, collate_fn, prefetch_factor, persistent_workers: see torch's DataLoader.

    Example::

        loader = paceline.ShardLoader(dataset, batch_size=4, shards=shards)
    """

    def __init__(
        self,
        dataset: IndexedDataset,
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
        self._plan: EpochPlan | None = None  # cached plan of the latest epoch
        self._collate: Callable[[list[Any]], Any] = default_collate if collate_fn is None else collate_fn
        self._batch_dataset = _BatchDataset(dataset, shards.seed)
        untyped: Any = self._batch_dataset  # typed as Any, because `_BatchDataset` is not a subclass of torch's Dataset
        self._upcoming = _Batches()
        self._loader: DataLoader[Any] = DataLoader(
            untyped,
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
        """Yields all steps of epoch 0 for an evaluation, then restores the position.

        Raises:
            ValueError: an epoch is in progress, or there are fewer samples than shards.
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
        """Returns the number of remaining steps in the epoch, which is the same on every rank."""
        return self._steps() - self._next_step

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the steps that have been yielded so far."""
        return {"epoch": self.epoch, "step": self._next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores a saved position; the number of ranks may differ, but not the number of shards or the batch size."""
        self.epoch, self._next_step = state["epoch"], state["step"]

    def _steps(self) -> int:
        return -(-len(self._dataset) // (self._shards.count * self._batch_size))

    def _plan_of(self, epoch: int) -> EpochPlan:
        """Returns the cached plan of an epoch, or creates it."""
        if self._plan is None or (self._plan.epoch, len(self._plan.order)) != (epoch, len(self._dataset)):
            samples, shards = len(self._dataset), self._shards
            self._plan = EpochPlan.of(
                epoch, samples, shards.count, self._batch_size, seed=shards.seed, shuffle=self._shuffle
            )
        return self._plan

    def _steps_as_dealt(self) -> Iterator[StepBatches]:
        """Yields the epoch's remaining steps, and stops early when this rank is assigned different shards."""
        mine = self._shards.mine
        remaining = self._remaining(mine)
        while self._next_step < self._steps():
            self._shards.begin_batch()
            if self._shards.mine != mine:
                return  # the batches that the loader has prefetched are for the previous shards
            yield next(remaining)

    def _remaining(self, mine: range) -> Iterator[StepBatches]:
        plan, steps = self._plan_of(self.epoch), self._steps()
        # A lazy generator lets an elastic job continue in a new view without first listing all batches.
        self._upcoming.listed = plan.batches(range(self._next_step, steps), mine)
        # A rank without shards, such as a worker that is catching up, does not start loader processes.
        batches = recorded_waits(iter(self._loader) if mine else iter(()), "ShardLoader")
        while self._next_step < steps:
            step = self._next_step
            self._next_step = step + 1
            keys = [(plan.epoch, step, shard) for shard in mine if plan.count_of(step, shard)]
            yield StepBatches(
                [self._batch(plan, key, next(batches)) for key in keys], partial(self._read_in, plan, step)
            )

    def _read_in(self, plan: EpochPlan, step: int, shard: int) -> ShardBatch | None:
        """Reads a shard's batch in this process; returns None if the shard has no samples in the step."""
        key, samples = (plan.epoch, step, shard), plan.samples_of(step, shard)
        if not samples:
            return None
        return self._batch(plan, key, self._collate(self._batch_dataset.__getitems__([key, *samples])))

    def _batch(self, plan: EpochPlan, key: tuple[int, int, int], data: Any) -> ShardBatch:
        return ShardBatch(key, plan.count_of(*key[1:]) / plan.samples_of_step(key[1]), data)


class _Batches:
    """The DataLoader's batch sampler: yields each batch as a key followed by sample indices.

    The sampler does not reference the `ShardLoader`. With a reference cycle, the garbage collector would stop the
    loader's worker processes, and would take five seconds for each of them.
    """

    def __init__(self) -> None:
        self.listed: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.listed


class _BatchDataset:
    """The DataLoader's dataset: reads whole batches, each with the random stream for its key."""

    def __init__(self, dataset: IndexedDataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keyed: Sequence[Any]) -> list[Any]:
        key, *indices = keyed
        with random_stream(self._seed, READING, *key):
            return [self._dataset[index] for index in indices]
