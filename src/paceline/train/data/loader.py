"""StatefulLoader: a loader that can resume in the middle of an epoch, even with a different number of ranks."""

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
    """Raises an error if the loader cannot read the dataset with these arguments; see `StatefulLoader`."""
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
            "because samples are assigned by their position in the stream or by their index"
        )
    elif dataset_state:
        raise ValueError(
            f"StatefulLoader got dataset_state=True with a {kind}, which is not a stream; leave it out, because the "
            "position is the complete state of an epoch of indices"
        )


def require_divisible(batch_size: int, remainder: str) -> None:
    """Raises an error if `batch_size` or `remainder` is invalid."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if remainder not in get_args(Remainder):
        raise ValueError(f"remainder is {remainder!r}; it must be one of {', '.join(get_args(Remainder))}")


class StatefulLoader(Generic[Sample]):
    """Yields batches from this rank's part of `dataset`; can resume an epoch, even with a different number of ranks.

    An iteration yields the rest of the epoch, and the next iteration starts the next epoch in a different order. A
    batch counts as used once it has been yielded; prefetched batches do not count. In a step, the ranks together read
    the next `world_size * batch_size` samples in the epoch's order. A state that all ranks save at the same step is
    therefore a single position, from which any number of ranks can resume with any batch size. Each sample is used
    exactly once.

    The samples in a stream (an `IterableDataset`) are divided in the stream's own order, by the same rules and without
    communication. Every rank and every loader worker reads the whole stream and keeps its own part, unless the stream
    supports one of these methods:

    - `advance(n)` on the iterator skips n samples without producing them, and returns the number skipped. Skipping
      other ranks' samples then costs no more than this call.
    - `skip(n)` on the dataset returns a dataset without the first n samples. The loader calls it to resume an epoch;
      without this method, the loader reads earlier samples again or skips them with `advance`.
    - `state_dict` and `load_state_dict` on the dataset or its iterator save and restore the position, if
      `dataset_state` is True. Resuming an epoch then re-reads at most one step.

    If the dataset has a method `set_epoch`, every process that reads the dataset, including workers, calls this method
    with the epoch before each pass.

    In an epoch, a stream must yield the same samples in the same order to every rank and in every pass. While a stream
    is being read, `get_worker_info` returns None even in workers, so a dataset does not split itself.

    Args:
        dataset: an indexable dataset with a length, or an `IterableDataset`.
        batch_size: the number of samples per rank in a step.
        shuffle, seed: whether to permute the indices, and the seed, to which the epoch is added. Both must be the same
            on every rank. By default, indexable datasets are shuffled. A stream always keeps its own order.
        num_replicas, rank: the number of parts and the index of the part to read; if None, the default group's size and
            rank at the start of each iteration.
        remainder: the handling of the last samples if they do not fill a step. "share" divides them; if there are fewer
            samples than ranks, some ranks have one step fewer. "repeat" divides them, and each rank without a sample
            repeats another rank's sample. "drop" skips them.
        dataset_state: whether to save the state of the stream with each position and resume from it. The state must be
            exact: after loading a state that was saved after n samples, any process must continue with sample n.
            Workers send the state with each batch, so the state should be small.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor,
        persistent_workers: see torch's DataLoader. `collate_fn` runs in the workers and receives only this rank's
        samples, so use it for expensive work on a stream's samples.

    Raises:
        TypeError: the dataset is neither a stream nor indexable with a length.
        ValueError: `batch_size` is not positive, `shuffle` is True for a stream, `dataset_state` is True for an
            indexable dataset, or the DataLoader rejects an argument.

    >>> loader = StatefulLoader(range(8), batch_size=2, shuffle=False, num_replicas=2, rank=0)
    >>> batch = next(iter(loader))  # samples 0 and 1; rank 1 reads samples 2 and 3
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
        self._returned: tuple[int, ...] = ()  # earlier places to read again at the end of the epoch
        self._bookmark = StreamPosition(0)  # where to resume reading; with a state, at most one step behind `_position`
        self._assigner: BatchAssigner | None = None
        self._step: EpochStep | None = None  # the latest step in an elastic job
        self._ordered: tuple[tuple[int, bool, int, int], list[int]] | None = None  # a key and its cached order
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
        """Yields the rest of the epoch, and invalidates any earlier iterator that was not exhausted."""
        self._iteration += 1
        if self._assigner is not None:
            return self._iterate_assigned(self._iteration, self._assigner)
        return self._iterate(self._iteration)

    def __len__(self) -> int:
        """Returns the number of batches that remain for this rank in the epoch.

        Raises:
            TypeError: the dataset is a stream without a length.
        """
        left = max(length_of(self.dataset) - self._position, 0) + len(self._returned)
        return self._sharding().batches(left)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch. A different epoch starts from its beginning; the current epoch keeps its position."""
        if epoch != self.epoch:
            self._set_position(epoch, 0)
            self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch after the batches yielded so far.

        The state is the same on every rank, unless some ranks skip the last step. Rank 0 never skips a step, so save
        the state of rank 0. With `dataset_state`, the returned position includes the state of the stream.
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
        """Resumes from the position and the seed in `state`.

        Raises:
            ValueError: the state was saved with a different dataset length or a different `shuffle`.
        """
        length = self._length()
        if state["length"] != length or state["shuffle"] != self.shuffle:
            raise ValueError(
                f"the state is of {_counted(state['length'])} samples with shuffle={state['shuffle']}, this loader has "
                f"{_counted(length)} with shuffle={self.shuffle}; load it into a loader of the same dataset and order"
            )
        self.seed = int(state["seed"])
        self._set_position(int(state["epoch"]), int(state["position"]))
        self._returned = tuple(state.get("returned", ()))
        if isinstance(self._batches, IndexedBatches) and length is not None:
            self._order_of_epoch(length)  # computed here because ranks of elastic jobs wait for the first batch
        if self.dataset_state and "stream" in state:
            self._bookmark = StreamPosition(**state["stream"])
        self._iteration += 1

    def use_batch_assigner(self, assigner: BatchAssigner) -> None:
        """Divides all subsequent batches among the ranks that `assigner` selects; each rank gets a batch in every step.

        Raises:
            ValueError: the loader was created with `num_replicas` or `rank`.
        """
        if self.num_replicas is not None or self.rank is not None:
            raise ValueError(
                f"StatefulLoader has num_replicas={self.num_replicas} and rank={self.rank}, but the ranks of an "
                "elastic job change; leave both out"
            )
        self._assigner = assigner

    def return_samples_of(self, ranks: Iterable[int]) -> None:
        """Schedules a second read, at the end of the epoch, of the samples that these ranks read in the latest step."""
        if self._step is not None:
            for rank in ranks:
                self._returned += tuple(self._step.places_of(rank))

    def place(self) -> tuple[int, int, int]:
        """Returns the epoch, the position in the epoch, and the number of samples that will be read again."""
        return self.epoch, self._position, len(self._returned)

    def _sharding(self) -> BatchSharding:
        num_replicas, rank = which_part(self.num_replicas, self.rank)
        return BatchSharding(self.batch_size, num_replicas, rank, self.remainder)

    def _length(self) -> int | None:
        try:
            return length_of(self.dataset)
        except TypeError:  # for example, a torch ChainDataset whose parts have no length
            return None

    def _set_position(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self._position = position
        self._returned = ()
        self._bookmark = StreamPosition(0)
        self._reading += 1

    def _read(self, sharding: BatchSharding) -> Iterator[ReadBatch]:
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
        """Returns the order of the current epoch, computed on the first call and cached."""
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
            if iteration != self._iteration:  # a newer iterator uses the workers now
                return
        self._set_position(self.epoch + 1, 0)

    def _iterate_assigned(self, iteration: int, assigner: BatchAssigner) -> Iterator[Any]:
        slot: RankSlot | None = None
        expected: tuple[int, tuple[int, ...]] | None = None
        while iteration == self._iteration:
            now = assigner.begin_batch()
            if now != slot or (self._position, self._returned) != expected:
                slot = now  # prefetched batches do not match the new division
                batches = self._read(sharding_for(slot, self.batch_size, self.remainder))
            taken = next(batches, None)
            if taken is None:
                self._set_position(self.epoch + 1, 0)
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
