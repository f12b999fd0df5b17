"""IndexedBatches and StreamBatches: use a DataLoader to read a rank's batches from an indexable dataset or a stream.

`StreamReader` reads a stream sequentially and returns one rank's part of each step.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from paceline.train.data.epoch_order import BatchSharding, ReadBatch, RemainingSamples, StreamPosition, step_shards

T = TypeVar("T")


class IndexedBatches:
    """Reads a rank's batches from an indexable dataset."""

    def __init__(self, dataset: Dataset[Any], options: dict[str, Any]) -> None:
        self._indices = _UpcomingItems[list[int]]()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._indices, **options)

    def read(self, count: int, index_of: Callable[[int], int], sharding: BatchSharding) -> Iterator[tuple[Any, int]]:
        """Yields this rank's batches for `count` places; each batch is paired with the place at which its step ends.

        `index_of` returns the sample index for a place. It is called lazily, so the cost of changing the set of ranks
        does not depend on the length of the epoch. It must not reference the owner of this object; see
        `_UpcomingItems`.
        """
        self._indices.upcoming = (
            [index_of(place) for place in shard.places] for shard in step_shards(0, count, sharding)
        )
        # The DataLoader returns batches in the order in which they were requested.
        for shard, batch in zip(step_shards(0, count, sharding), self._loader, strict=True):
            yield batch, shard.end


class _UpcomingItems(Generic[T]):
    """The DataLoader's sampler, which yields the indices of batches, or requests, possibly indefinitely.

    The sampler must not reference the owner of the DataLoader. With a reference cycle, the garbage collector could
    close the queues of the worker processes first, and torch would then wait five seconds for each process.
    """

    def __init__(self) -> None:
        self.upcoming: Iterable[T] = ()

    def __iter__(self) -> Iterator[T]:
        return iter(self.upcoming)


class StepRequest(NamedTuple):
    """A loader's request to a worker process for this rank's batch in the step at `position`.

    If the worker must open the stream, it starts reading at `start`. If the `reading` number has changed, the worker
    reopens the stream. If `picked` is not empty, the batch consists of the samples at these places.
    """

    reading: int
    epoch: int
    position: int
    start: StreamPosition
    sharding: BatchSharding
    picked: tuple[int, ...] = ()


class StepResponse(NamedTuple):
    """The batch from the step at `before`; `end` is the position after the step, or None if there is no batch."""

    batch: Any
    before: StreamPosition
    end: int | None


class StreamBatches:
    """Reads a rank's batches from a stream, with one request per step.

    A DataLoader returns batches in the order of the requests, regardless of which workers process them. The main
    process cannot determine the length of the stream, so it sends requests until a worker reports that there is no
    batch.
    """

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool, options: dict[str, Any]) -> None:
        self._requests = _UpcomingItems[StepRequest]()
        self._loader: DataLoader[Any] = DataLoader(
            _StepDataset(dataset, keeps_states),
            batch_size=None,
            sampler=self._requests,
            **{**options, "collate_fn": _Collate(options["collate_fn"] or default_collate)},
        )

    def read(self, first: StepRequest, returned: tuple[int, ...]) -> Iterator[ReadBatch]:
        """Yields the batches from the request `first` to the end of the stream, then batches for `returned` places."""
        position = first.position
        self._requests.upcoming = (first._replace(position=start) for start in count(position, first.sharding.step))
        for served in self._loader:
            if served.end is None:
                break
            yield ReadBatch(
                served.batch, served.before, RemainingSamples(position, served.end, returned), served.end - position
            )
            position = served.end
        if returned:
            yield from self._read_again(first, RemainingSamples(position, position, tuple(sorted(returned))))

    def _read_again(self, first: StepRequest, rest: RemainingSamples) -> Iterator[ReadBatch]:
        """Yields the batches for returned places, reading the stream again in ascending order of places."""
        shards = list(step_shards(0, len(rest), first.sharding))
        picked = [tuple(rest.returned[place] for place in shard.places) for shard in shards]
        self._requests.upcoming = [
            StepRequest(first.reading, first.epoch, places[0], StreamPosition(places[0]), first.sharding, places)
            for places in picked
        ]
        used = 0
        for shard, served in zip(shards, self._loader, strict=True):
            yield ReadBatch(served.batch, first.start, rest.after(used), shard.end - used)
            used = shard.end


class _StepDataset(Dataset[StepResponse]):
    """The DataLoader's dataset, which answers requests; each worker has a copy with its own reader."""

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool) -> None:
        self._dataset = dataset
        self._keeps_states = keeps_states
        self._reading: int | None = None
        self._reader: StreamReader | None = None

    def __getitem__(self, request: StepRequest) -> StepResponse:
        """Skips to the requested step and reads this rank's samples in it."""
        with _hidden_worker_info():
            reader, self._reader = self._reader_for(request), None  # a reader that has failed must not be reused
            reader.skip_samples(request.position - reader.position)
            before = reader.bookmark()
            samples = reader.pick(request.picked) if request.picked else reader.take(request.sharding, before)
            self._reader = reader
        return StepResponse(samples, before, reader.position if samples else None)

    def _reader_for(self, request: StepRequest) -> StreamReader:
        reader = self._reader
        if reader is None or self._reading != request.reading or reader.position > request.position:
            reader = StreamReader(self._dataset, request.epoch, request.start, self._keeps_states)
            self._reading = request.reading
        return reader


class _Collate:
    """Collates the samples in a response; runs in the process that read them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, served: StepResponse) -> StepResponse:
        return served if served.end is None else served._replace(batch=self._collate(served.batch))


@contextmanager
def _hidden_worker_info() -> Iterator[None]:
    """Makes `get_worker_info` return None, as in a main process, so that a dataset does not split itself again."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


class StreamReader:
    """Reads one epoch of `dataset`, beginning at `start`.

    The reader uses a shallow copy of the dataset. Iterating over the copy or loading a state into it may therefore set
    attributes without affecting the next epoch.

    Args:
        dataset: the whole stream, which yields the same samples in every process.
        epoch: the argument for the dataset's `set_epoch`, if the dataset has this method.
        start: the position at which to begin. To reach it, the reader uses the first of the following that exists: the
            state in `start`, the dataset's `skip`, or the iterator's `advance`. If none of them exists, the reader
            reads all earlier samples.
        keeps_states: whether bookmarks include the state of the stream.
    """

    def __init__(self, dataset: IterableDataset[Any], epoch: int, start: StreamPosition, keeps_states: bool) -> None:
        self.position = 0
        self._epoch = epoch
        self._source = dataset
        self._keeps_states = keeps_states
        self._dataset: Any = _at_epoch(_copied(dataset), epoch)
        if start.state is None and start.position and hasattr(dataset, "skip"):
            self._dataset = _at_epoch(_without_first(self._dataset, start.position), epoch)
            self.position = start.position
        self._samples: Any = iter(self._dataset)
        if start.state is not None:
            self._load(start)
        self._advances = hasattr(self._samples, "advance")
        self.skip_samples(start.position - self.position)
        if self.position < start.position:
            raise ValueError(
                f"the state is at sample {start.position} of epoch {epoch}, but {type(dataset).__name__} ended after "
                f"{self.position}; a stream must yield the same samples in each reading of an epoch, so load the state "
                "with the stream that it was taken from"
            )

    def bookmark(self) -> StreamPosition:
        """Returns the current position, with the stream's state if `keeps_states` is set."""
        return StreamPosition(self.position, copy.deepcopy(self._owner().state_dict()) if self._keeps_states else None)

    def skip_samples(self, count: int) -> int:
        """Skips up to `count` samples, and returns the number skipped, which is smaller at the end of the stream."""
        if self._advances:
            passed: int = self._samples.advance(count)
            if not isinstance(passed, int):
                raise TypeError(
                    f"{type(self._samples).__name__}.advance({count}) returned {passed!r}; it must return the number "
                    "of samples that it moved past, which is less than asked for at the end of the stream"
                )
        else:
            passed = sum(1 for _ in islice(self._samples, count))
        self.position += passed
        return passed

    def take(self, sharding: BatchSharding, start: StreamPosition) -> list[Any]:
        """Reads the next step, which begins at `start`, and returns this rank's samples (possibly none).

        Afterward the reader is at the end of the step.
        """
        return self._take_own(sharding, start) if self._advances else self._take_among_all(sharding)

    def pick(self, places: tuple[int, ...]) -> list[Any]:
        """Returns the samples at `places`, which must be in ascending order; skips all other samples."""
        samples: list[Any] = []
        for place in places:
            self.skip_samples(place - self.position)
            samples += self._next(1)
        if len(samples) < len(places):
            raise ValueError(
                f"sample {places[-1]} of epoch {self._epoch} is to be read again, but {type(self._source).__name__} "
                f"ended after {self.position}; a stream must yield the same samples in each reading of an epoch"
            )
        return samples

    def _take_among_all(self, sharding: BatchSharding) -> list[Any]:
        """Reads every sample in the step, and keeps those that belong to this rank.

        This rank's part of the last step depends on the number of remaining samples. Until this number is known, the
        reader keeps all samples that may belong to this rank: at most about a quarter of a step or one batch, whichever
        is larger.
        """
        kept: deque[Any] = deque()
        end = sharding.places(sharding.step).stop
        first = count = 0  # `kept` starts at place `first`
        for sample in islice(self._samples, sharding.step):
            if count < end:
                kept.append(sample)
            count += 1
            while first < min(sharding.earliest(count), count):
                kept.popleft()
                first += 1
        self.position += count
        return [kept[place - first] for place in sharding.places(count)]

    def _take_own(self, sharding: BatchSharding, start: StreamPosition) -> list[Any]:
        """Reads this rank's samples in the step and skips all other samples; reads an incomplete step twice."""
        places = sharding.places(sharding.step)
        self.skip_samples(places.start)
        samples = self._next(len(places))
        self.skip_samples(start.position + sharding.step - self.position)
        count = self.position - start.position
        if count == sharding.step:
            return samples
        places = sharding.places(count)
        if not places:
            return []
        again = StreamReader(self._source, self._epoch, start, self._keeps_states)
        again.skip_samples(places.start)
        return again._next(len(places))

    def _next(self, count: int) -> list[Any]:
        samples = list(islice(self._samples, count))
        self.position += len(samples)
        return samples

    def _load(self, start: StreamPosition) -> None:
        owner = self._owner()
        owner.load_state_dict(copy.deepcopy(start.state))
        if owner is not self._samples:
            self._samples = iter(self._dataset)
        self.position = start.position

    def _owner(self) -> Any:
        """Returns the object that provides the stream's state: the iterator or the dataset."""
        for owner in (self._samples, self._dataset):
            if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
                return owner
        raise TypeError(
            f"neither {type(self._dataset).__name__} nor its iterator has state_dict and load_state_dict, which "
            "dataset_state=True needs; add them, or leave dataset_state out"
        )


def _copied(dataset: IterableDataset[Any]) -> IterableDataset[Any]:
    copied = copy.copy(dataset)
    if vars(copied) is vars(dataset):  # Hugging Face streams share this dictionary with their copies
        copied.__dict__ = dict(vars(dataset))
    return copied


def _at_epoch(dataset: Any, epoch: int) -> Any:
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return dataset


def _without_first(dataset: Any, count: int) -> Any:
    rest = dataset.skip(count)
    if not hasattr(rest, "__iter__"):
        raise TypeError(
            f"{type(dataset).__name__}.skip({count}) returned {rest!r}; it must return a dataset without the first "
            f"{count} samples"
        )
    return rest
