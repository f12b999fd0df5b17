"""Deals out the batches of a stream, which has an order but no index.

Deals out the batches of a dataset that can be indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from paceline.train.data.epoch_order import BatchSharding, step_shards
from paceline.train.data.remaining_samples import ReadBatch, RemainingSamples
from paceline.train.data.stream_reader import StreamPosition, StreamReader


class IndexedBatches:
    """The batches of an indexable dataset for one rank, read by a DataLoader."""

    def __init__(self, dataset: Dataset[Any], options: dict[str, Any]) -> None:
        self._indices = _Indices()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._indices, **options)

    def read(self, count: int, index_of: Callable[[int], int], deal: BatchSharding) -> Iterator[tuple[Any, int]]:
        """Yields the batches of `count` places, and where each batch's step ends.

        Nothing is listed beforehand, so that ranks which are dealt other parts go on at once, however long the epoch
        is. `index_of` returns the index of the sample in a place; it must not refer to what owns this, see `_Indices`.
        """
        self._indices.upcoming = ([index_of(place) for place in share.places] for share in step_shards(0, count, deal))
        # The DataLoader returns batches in the order in which it was asked for them.
        for share, batch in zip(step_shards(0, count, deal), self._loader, strict=True):
            yield batch, share.end


class _Indices:
    """The indices of the remaining batches, for the DataLoader.

    It does not refer to what owns the DataLoader: in a cycle, the worker processes would be ended by the collector of
    garbage, which closes their queues first, and torch then waits five seconds for each of them.
    """

    upcoming: Iterable[list[int]]

    def __init__(self) -> None:
        self.upcoming = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.upcoming)


class StepRequest(NamedTuple):
    """What a loader asks a worker for: this rank's batch of the step at `position`.

    `start` is where the worker begins to read if it has to open the stream. An order with another `reading` than the
    one before makes it open the stream anew. If `picked` names places, the batch is the samples there.
    """

    reading: int
    epoch: int
    position: int
    start: StreamPosition
    deal: BatchSharding
    picked: tuple[int, ...] = ()


class StepResponse(NamedTuple):
    """The batch of a step, which begins at `before`; `end` is the position after it, or None if there is no batch."""

    batch: Any
    before: StreamPosition
    end: int | None


class StreamBatches:
    """The batches of a stream for one rank, read by a DataLoader that is asked for one step after the other.

    A DataLoader returns what it was asked for in the order of the requests, whichever worker serves them. The main
    process does not know where the stream ends, so it asks until a worker answers that there is no batch.
    """

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool, options: dict[str, Any]) -> None:
        self._orders = _RequestSampler()
        self._loader: DataLoader[Any] = DataLoader(
            _StepDataset(dataset, keeps_states),
            batch_size=None,
            sampler=self._orders,
            **{**options, "collate_fn": _Collate(options["collate_fn"] or default_collate)},
        )

    def read(self, first: StepRequest, returned: tuple[int, ...]) -> Iterator[ReadBatch]:
        """Yields each batch from the `first` on to the end of the stream, and then those of the `returned` places."""
        position = first.position
        self._orders.upcoming = (first._replace(position=at) for at in count(position, first.deal.step))
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
        """Yields the batches of the places that came back; the stream is read again for them, in their order."""
        plan = list(step_shards(0, len(rest), first.deal))
        picked = [tuple(rest.returned[at] for at in share.places) for share in plan]
        self._orders.upcoming = [
            StepRequest(first.reading, first.epoch, places[0], StreamPosition(places[0]), first.deal, places)
            for places in picked
        ]
        used = 0
        for share, served in zip(plan, self._loader, strict=True):
            yield ReadBatch(served.batch, first.start, rest.after(used), share.end - used)
            used = share.end


class _RequestSampler:
    """What the DataLoader is asked for, perhaps without end."""

    upcoming: Iterable[StepRequest]

    def __iter__(self) -> Iterator[StepRequest]:
        return iter(self.upcoming)


class _StepDataset(Dataset[StepResponse]):
    """Answers orders; each worker has a copy with a reader of its own."""

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool) -> None:
        self._dataset = dataset
        self._keeps_states = keeps_states
        self._reading: int | None = None
        self._reader: StreamReader | None = None

    def __getitem__(self, order: StepRequest) -> StepResponse:
        """Reads forward to the step and takes this rank's part of it."""
        with _unseen_workers():
            reader, self._reader = self._reader_for(order), None  # a reader that fails is not used again
            reader.skip_samples(order.position - reader.position)
            before = reader.bookmark()
            samples = reader.pick(order.picked) if order.picked else reader.take(order.deal, before)
            self._reader = reader
        return StepResponse(samples, before, reader.position if samples else None)

    def _reader_for(self, order: StepRequest) -> StreamReader:
        reader = self._reader
        if reader is None or self._reading != order.reading or reader.position > order.position:
            reader = StreamReader(self._dataset, order.epoch, order.start, self._keeps_states)
            self._reading = order.reading
        return reader


class _Collate:
    """Makes a batch of the samples that were served, in the process that has read them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, served: StepResponse) -> StepResponse:
        return served if served.end is None else served._replace(batch=self._collate(served.batch))


@contextmanager
def _unseen_workers() -> Iterator[None]:
    """Lets `get_worker_info` return None, as in a main process: what splits itself would be split twice."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
