"""StatefulLoader: a loader that can resume in mid-epoch, even with a different number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, get_args

from torch.utils.data import Dataset, IterableDataset

from paceline.comm.record.spans import recorded_waits
from paceline.train.data.batches import IndexedBatches, StepRequest, StreamBatches
from paceline.train.data.epoch_order import (
    BatchAssigner,
    BatchSharding,
    EpochStep,
    RankSlot,
    ReadBatch,
    Remainder,
    RemainingSamples,
    StreamPosition,
    epoch_order,
    length_of,
    sharding_for,
)
from paceline.train.data.sampler import which_part

Sample = TypeVar("Sample")


def require_readable(dataset: object, shuffle: bool | None, dataset_state: bool) -> None:
    """Raises if the loader cannot read the dataset with these arguments; see `StatefulLoader`."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError(
                f"StatefulLoader got shuffle=True with a {kind}, which is a stream and has only its own order; shuffle "
                "in the dataset, seeded by the epoch that its set_epoch receives, and leave shuffle out"
            )
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"StatefulLoader got a {kind}; it needs an IterableDataset, or a dataset with __len__ and __getitem__, "
            "because samples are dealt out by their place in the stream or by their index"
        )
    elif dataset_state:
        raise ValueError(
            f"StatefulLoader got dataset_state=True with a {kind}, which is not a stream; leave it out, because the "
            "position is the whole state of an epoch of indices"
        )


def require_divisible(batch_size: int, remainder: str) -> None:
    """Raises if the batch size or the treatment of the last samples is invalid."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if remainder not in get_args(Remainder):
        raise ValueError(f"remainder is {remainder!r}; it must be one of {', '.join(get_args(Remainder))}")


class StatefulLoader(Generic[Sample]):
    """Yields batches of this rank's part of `dataset`; an epoch can be resumed, even with a different number of ranks.

    An iteration yields the rest of the epoch; the next iteration is the next epoch, in a different order. A batch
    counts as used once it has been yielded; batches that the workers have read ahead do not count. In a step the ranks
    together take the next `world_size * batch_size` samples of the epoch's order, so a state that is taken at the same
    step on every rank is a single position. Any number of ranks, with any batch size, can resume from there, and each
    sample is used exactly once.

    The samples of a stream (an `IterableDataset`) are divided in the stream's own order, by the same rules and without
    communication. Every rank, and every loader worker, reads the whole stream and keeps its own part, unless the stream
    supports one of these methods:

    - `__iter__` returns an iterator with `advance(n)`, which moves past n samples without producing them and returns
    their number. Other ranks' samples then cost no more than that call. - The dataset has `skip(n)`, which returns a
    dataset without the first n samples. It is called when an epoch is
      resumed; otherwise the samples before the position are read again, or advanced past.
    - The dataset, or its iterator, has `state_dict` and `load_state_dict`, and `dataset_state` is true. Resuming an
    epoch then reads at most one step again. - The dataset has `set_epoch`. It is called with the epoch before each
    reading, including in workers.

    In an epoch, a stream must yield the same samples in the same order to every rank and in every reading. While it is
    read, `get_worker_info` returns None, even in workers, so that a dataset does not split itself.

    Args:
        dataset: a dataset with a length that can be indexed, or an `IterableDataset`.
        batch_size: the number of samples of each rank in a step.
        shuffle, seed: whether to permute the indices, seeded by `seed` plus the epoch; the same on every rank. By
            default indexable datasets are shuffled. A stream always keeps its own order.
        num_replicas, rank: the number of parts and the part to take; the default group's size and rank at each
            iteration if None.
        remainder: the treatment of the samples at the end that do not fill a step. "share": divide them; if there are
            fewer than ranks, some ranks have one step less than others. "repeat": those ranks take a sample of another
            rank. "drop": leave them out.
        dataset_state: whether to save the state of the stream with each position and resume from it. The state must be
            exact: a state that was taken after n samples leads to sample n in any process that loads it. Workers send
            it with each batch, so it should be small.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor,
        persistent_workers: the arguments of torch's DataLoader. `collate_fn` receives only this rank's samples, in the
        worker. Use it for expensive work on the samples of a stream.

    Raises:
        TypeError: the dataset is not a stream, and does not have a length and an index.
        ValueError: `batch_size` is not positive, `shuffle` is true for a stream, `dataset_state` is true for another
            dataset, or the DataLoader rejects an argument.

    >>> loader = StatefulLoader(range(8), batch_size=2, shuffle=False, num_replicas=2, rank=0)
    >>> batch = next(iter(loader))  # rank 1 has the samples 2 and 3
    >>> alone = StatefulLoader(range(8), batch_size=4, shuffle=False, num_replicas=1, rank=0)
    >>> alone.load_state_dict(loader.state_dict())
    >>> [batch.tolist() for batch in alone]
    [[4, 5, 6, 7]]
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        batch_size: int = 1,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        remainder: Remainder = "share",
        dataset_state: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Sample]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        require_readable(dataset, shuffle, dataset_state)
        require_divisible(batch_size, remainder)
        if num_replicas is not None and rank is not None:
            which_part(num_replicas, rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = not isinstance(dataset, IterableDataset) if shuffle is None else shuffle
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.remainder = remainder
        self.dataset_state = dataset_state
        self.epoch = 0
        self._position = 0
        self._returned: tuple[int, ...] = ()  # places before the position that are read again at the end of the epoch
        self._bookmark = StreamPosition(0)  # at most a step before the position, if it has a state
        self._assigner: BatchAssigner | None = None
        self._step: EpochStep | None = None  # the latest step with an assigner
        self._ordered: tuple[tuple[int, bool, int, int], list[int]] | None = None  # the key and the order of an epoch
        self._iteration = 0
        self._reading = 0
        options = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        self._batches: StreamBatches | IndexedBatches = (
            StreamBatches(dataset, dataset_state, options)
            if isinstance(dataset, IterableDataset)
            else IndexedBatches(dataset, options)
        )

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch; this ends an earlier iterator that was not exhausted."""
        self._iteration += 1
        if self._assigner is not None:
            return self._iterate_assigned(self._iteration, self._assigner)
        return self._iterate(self._iteration)

    def __len__(self) -> int:
        """Returns the number of batches that this rank has left in the epoch.

        Raises:
            TypeError: the dataset is a stream that has no length.
        """
        left = max(length_of(self.dataset) - self._position, 0) + len(self._returned)
        return self._sharding().batches(left)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch. A new epoch begins at its start; the current one keeps its position."""
        if epoch != self.epoch:
            self._go_to(epoch, 0)
            self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch after the batches yielded so far, as a few numbers.

        It is the same on every rank, except during a last step that some ranks do not have; rank 0 has all steps, so
        save rank 0's. With `dataset_state`, it includes the state of the stream.
        """
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "position": self._position,
            "length": self._length(),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
        if self._bookmark.state is not None:
            state["stream"] = self._bookmark._asdict()
        if self._returned:
            state["returned"] = list(self._returned)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the position and the seed of `state`.

        Raises:
            ValueError: the state was taken with a dataset of a different length, or with a different `shuffle`.
        """
        length = self._length()
        if state["length"] != length or state["shuffle"] != self.shuffle:
            raise ValueError(
                f"the state is of {_counted(state['length'])} samples with shuffle={state['shuffle']}, this loader has "
                f"{_counted(length)} with shuffle={self.shuffle}; load it into a loader of the same dataset and order"
            )
        self.seed = int(state["seed"])
        self._go_to(int(state["epoch"]), int(state["position"]))
        self._returned = tuple(state.get("returned", ()))
        if isinstance(self._batches, IndexedBatches) and length is not None:
            self._order_of_epoch(length)  # before the ranks of an elastic job wait for the first batch
        if self.dataset_state and "stream" in state:
            self._bookmark = StreamPosition(**state["stream"])
        self._iteration += 1

    def use_batch_assigner(self, assigner: BatchAssigner) -> None:
        """Divides all further batches among the ranks that `assigner` selects; each rank has a batch in every step.

        Raises:
            ValueError: the loader has fixed `num_replicas` or `rank`.
        """
        if self.num_replicas is not None or self.rank is not None:
            raise ValueError(
                f"StatefulLoader has num_replicas={self.num_replicas} and rank={self.rank}, but the ranks of an "
                "elastic job change; leave both out"
            )
        self._assigner = assigner

    def return_samples_of(self, ranks: Iterable[int]) -> None:
        """Schedules these ranks' samples of the latest step to be read again at the end of the epoch."""
        if self._step is not None:
            for rank in ranks:
                self._returned += tuple(self._step.places_of(rank))

    def place(self) -> tuple[int, int, int]:
        """Returns the epoch, the position in it, and the number of earlier samples that will be read again."""
        return self.epoch, self._position, len(self._returned)

    def _sharding(self) -> BatchSharding:
        num_replicas, rank = which_part(self.num_replicas, self.rank)
        return BatchSharding(self.batch_size, num_replicas, rank, self.remainder)

    def _length(self) -> int | None:
        try:
            return length_of(self.dataset)
        except TypeError:  # torch's ChainDataset has a __len__ that works only if all its parts have one
            return None

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self._position = position
        self._returned = ()
        self._bookmark = StreamPosition(0)
        self._reading += 1

    def _read(self, sharding: BatchSharding) -> Iterator[ReadBatch]:
        """Yields each batch of the rest of the epoch."""
        if isinstance(self._batches, StreamBatches):
            start = StreamPosition(self._position) if self._bookmark.state is None else self._bookmark
            request = StepRequest(self._reading, self.epoch, self._position, start, sharding)
            yield from recorded_waits(self._batches.read(request, self._returned), "StatefulLoader")
            return
        rest = RemainingSamples(self._position, length_of(self.dataset), self._returned)
        indices = self._order_of_epoch(rest.length)
        batches = self._batches.read(len(rest), lambda index: indices[rest.place(index)], sharding)
        used = 0
        for batch, end in recorded_waits(batches, "StatefulLoader"):
            yield ReadBatch(batch, StreamPosition(0), rest.after(used), end - used)
            used = end

    def _order_of_epoch(self, length: int) -> list[int]:
        """Returns the order of the current epoch, which is cached for further readings of it."""
        key = length, self.shuffle, self.seed, self.epoch
        if self._ordered is None or self._ordered[0] != key:
            self._ordered = key, epoch_order(*key)
        return self._ordered[1]

    def _use(self, taken: ReadBatch) -> None:
        left = taken.before.after(taken.used)
        self._position, self._returned, self._bookmark = left.position, left.returned, taken.bookmark

    def _iterate(self, iteration: int) -> Iterator[Any]:
        if iteration != self._iteration:
            return
        for taken in self._read(self._sharding()):
            self._use(taken)
            yield taken.batch
            if iteration != self._iteration:  # persistent workers serve the later iteration now
                return
        self._go_to(self.epoch + 1, 0)

    def _iterate_assigned(self, iteration: int, assigner: BatchAssigner) -> Iterator[Any]:
        slot: RankSlot | None = None
        expected: tuple[int, tuple[int, ...]] | None = None
        while iteration == self._iteration:
            now = assigner.begin_batch()
            if now != slot or (self._position, self._returned) != expected:
                slot = now  # the batches that were read ahead belong to other ranks now
                batches = self._read(sharding_for(slot, self.batch_size, self.remainder))
            taken = next(batches, None)
            if taken is None:
                self._go_to(self.epoch + 1, 0)
                return
            self._step = EpochStep(taken.before, slot.ranks, taken.used)
            self._use(taken)
            expected = self._position, self._returned
            is_own = slot.rank is not None and bool(self._step.places_of(slot.rank))
            assigner.batch_delivered(counts=is_own or (self.remainder == "repeat" and slot.rank is not None))
            yield taken.batch
            if iteration == self._iteration:
                assigner.end_batch()


def _counted(length: int | None) -> str:
    return "an unknown number of" if length is None else str(length)
