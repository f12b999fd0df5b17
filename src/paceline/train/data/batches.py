"""IndexedBatches and StreamBatches: read a rank's batches from an indexable dataset or a stream with a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from paceline.train.data.epoch_order import BatchSharding, ReadBatch, RemainingSamples, StreamPosition, step_shards
from paceline.train.data.stream_reader import StreamReader


class IndexedBatches:
    """Reads a rank's batches from an indexable dataset."""

    def __init__(self, dataset: Dataset[Any], options: dict[str, Any]) -> None:
        self._indices = _Indices()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._indices, **options)

    def read(self, count: int, index_of: Callable[[int], int], sharding: BatchSharding) -> Iterator[tuple[Any, int]]:
        """Yields this rank's batches for `count` places, each with the place at which its step ends.

        Indices are computed lazily, so the cost of a change of ranks does not depend on the length of the epoch.

        Args:
            count: the number of places.
            index_of: a function that returns the sample index for a place. It must not reference the owner of this
                object; see `_Indices`.
            sharding: the division of a step.
        """
        self._indices.upcoming = (
            [index_of(place) for place in shard.places] for shard in step_shards(0, count, sharding)
        )
        # The DataLoader returns batches in the order of its requests.
        for shard, batch in zip(step_shards(0, count, sharding), self._loader, strict=True):
            yield batch, shard.end


class _Indices:
    """The DataLoader's batch sampler, which yields the indices of the remaining batches.

    The sampler must not reference the owner of the DataLoader. With a reference cycle, the garbage collector may close
    the queues of the worker processes first, after which torch waits five seconds for each process.
    """

    upcoming: Iterable[list[int]]

    def __init__(self) -> None:
        self.upcoming = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.upcoming)


class StepRequest(NamedTuple):
    """A loader's request to a worker process for this rank's batch in the step at `position`.

    If the worker must open the stream, it starts reading at `start`. A changed `reading` number makes the worker reopen
    the stream. If `picked` is not empty, the batch consists of the samples at these places.
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
    """Reads a rank's batches from a stream, one request per step.

    A DataLoader returns batches in the order of the requests, regardless of which workers process them. The main
    process cannot determine the length of the stream, so it sends requests until a worker reports that there is no
    batch.
    """

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool, options: dict[str, Any]) -> None:
        self._requests = _RequestSampler()
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


class _RequestSampler:
    """The DataLoader's sampler, which yields requests, possibly without end."""

    upcoming: Iterable[StepRequest]

    def __iter__(self) -> Iterator[StepRequest]:
        return iter(self.upcoming)


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
            reader, self._reader = self._reader_for(request), None  # a reader that fails must not be reused
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
