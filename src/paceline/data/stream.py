"""Deals out the batches of a stream, which has an order but no index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from paceline.data.order import Deal
from paceline.data.reader import Bookmark, StreamReader


class Order(NamedTuple):
    """What a loader asks a worker for: this rank's batch of the step at `position`.

    `start` is where the worker begins to read if it has to open the stream. An order with another `reading` than the
    one before makes it open the stream anew.
    """

    reading: int
    epoch: int
    position: int
    start: Bookmark
    deal: Deal


class Served(NamedTuple):
    """The batch of a step, which begins at `before`; `end` is the position after it, or None if there is no batch."""

    batch: Any
    before: Bookmark
    end: int | None


class StreamBatches:
    """The batches of a stream for one rank, read by a DataLoader that is asked for one step after the other.

    A DataLoader returns what it was asked for in the order of the requests, whichever worker serves them. The main
    process does not know where the stream ends, so it asks until a worker answers that there is no batch.
    """

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool, options: dict[str, Any]) -> None:
        self._orders = _Orders()
        self._loader: DataLoader[Any] = DataLoader(
            _Steps(dataset, keeps_states),
            batch_size=None,
            sampler=self._orders,
            **{**options, "collate_fn": _Collate(options["collate_fn"] or default_collate)},
        )

    def read(self, first: Order) -> Iterator[tuple[Any, Bookmark, int]]:
        """Yields each batch from the `first` on, with the beginning of its step, and the position of its end."""
        self._orders.first = first
        for served in self._loader:
            if served.end is None:
                return
            yield tuple(served)


class _Orders:
    """Orders without end, for the DataLoader."""

    first: Order

    def __iter__(self) -> Iterator[Order]:
        first = self.first
        return (first._replace(position=position) for position in count(first.position, first.deal.step))


class _Steps(Dataset[Served]):
    """Answers orders; each worker has a copy with a reader of its own."""

    def __init__(self, dataset: IterableDataset[Any], keeps_states: bool) -> None:
        self._dataset = dataset
        self._keeps_states = keeps_states
        self._reading: int | None = None
        self._reader: StreamReader | None = None

    def __getitem__(self, order: Order) -> Served:
        """Reads forward to the step and takes this rank's part of it."""
        with _unseen_workers():
            reader, self._reader = self._reader_for(order), None  # a reader that fails is not used again
            reader.pass_over(order.position - reader.position)
            before = reader.bookmark()
            samples = reader.take(order.deal, before)
            self._reader = reader
        return Served(samples, before, reader.position if samples else None)

    def _reader_for(self, order: Order) -> StreamReader:
        reader = self._reader
        if reader is None or self._reading != order.reading or reader.position > order.position:
            reader = StreamReader(self._dataset, order.epoch, order.start, self._keeps_states)
            self._reading = order.reading
        return reader


class _Collate:
    """Makes a batch of the samples that were served, in the process that has read them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, served: Served) -> Served:
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
