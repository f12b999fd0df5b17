"""IndexedBatches and StreamBatches: a rank's batches of an indexable dataset or of a stream, read by a DataLoader."""

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
    """A rank's batches of an indexable dataset."""

    def __init__(self, dataset: Dataset[Any], options: dict[str, Any]) -> None:
        self._indices = _Indices()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._indices, **options)

    def read(self, count: int, index_of: Callable[[int], int], sharding: BatchSharding) -> Iterator[tuple[Any, int]]:
        """Yields the batches of `count` places, each with the end of its step.

        Nothing is computed in advance, so a change of the ranks takes the same time for epochs of any length.

        Args:
            count: the number of places.
            index_of: a function that returns the index of the sample in a place. It must not refer to the owner of this
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
    """The indices of the remaining batches, for the DataLoader.

    It must not refer to the owner of the DataLoader. In a cycle, the garbage collector would end the worker processes
    and close their queues first, after which torch waits five seconds for each process.
    """

    upcoming: Iterable[list[int]]

    def __init__(self) -> None:
        self.upcoming = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.upcoming)


class StepRequest(NamedTuple):
    """A loader's request to a worker for this rank's batch of the step at `position`.

    `start` is the position at which the worker begins to read if it has to open the stream. A new number `reading`
    makes it open the stream again. If `picked` lists places, the batch consists of the samples in these places.
    """

    reading: int
    epoch: int
    position: int
    start: StreamPosition
    sharding: BatchSharding
    picked: tuple[int, ...] = ()


class StepResponse(NamedTuple):
    """The batch of a step that begins at `before`; `end` is the position after it, or None if there is no batch."""

    batch: Any
    before: StreamPosition
    end: int | None


class StreamBatches:
    """A rank's batches of a stream, requested step by step.

    A DataLoader returns batches in the order of the requests, regardless of which workers serve them. The main process
    cannot determine the end of the stream, so it sends requests until a worker reports that there is no batch.
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
        """Yields the batches from the request `first` to the end of the stream, and then those of `returned` places."""
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
        """Yields the batches of returned places, for which the stream is read again in the order of the places."""
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
    """The requests to the DataLoader, possibly infinitely many."""

    upcoming: Iterable[StepRequest]

    def __iter__(self) -> Iterator[StepRequest]:
        return iter(self.upcoming)


class _StepDataset(Dataset[StepResponse]):
    """Serves requests; each worker has a copy with a separate reader."""

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool) -> None:
        self._dataset = dataset
        self._keeps_states = keeps_states
        self._reading: int | None = None
        self._reader: StreamReader | None = None

    def __getitem__(self, request: StepRequest) -> StepResponse:
        """Reads forward to the step and takes this rank's part of it."""
        with _hidden_worker_info():
            reader, self._reader = self._reader_for(request), None  # a reader that fails is not used again
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
    """Collates the samples of a response in the process that read them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, served: StepResponse) -> StepResponse:
        return served if served.end is None else served._replace(batch=self._collate(served.batch))


@contextmanager
def _hidden_worker_info() -> Iterator[None]:
    """Makes `get_worker_info` return None, as in a main process, so that a dataset does not split itself as well."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
