"""Deals out the batches of a stream, which has an order but no index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from paceline.data.order import Deal, shares
from paceline.data.reader import Bookmark, StreamReader
from paceline.data.rest import Rest, Taken


class Order(NamedTuple):
    """What a loader asks a worker for: this rank's batch of the step at `position`.

    `start` is where the worker begins to read if it has to open the stream. An order with another `reading` than the
    one before makes it open the stream anew. If `picked` names places, the batch is the samples there.
    """

    reading: int
    epoch: int
    position: int
    start: Bookmark
    deal: Deal
    picked: tuple[int, ...] = ()


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

    def read(self, first: Order, returned: tuple[int, ...]) -> Iterator[Taken]:
        """Yields each batch from the `first` on to the end of the stream, and then those of the `returned` places."""
        position = first.position
        self._orders.upcoming = (first._replace(position=at) for at in count(position, first.deal.step))
        for served in self._loader:
            if served.end is None:
                break
            yield Taken(served.batch, served.before, Rest(position, served.end, returned), served.end - position)
            position = served.end
        if returned:
            yield from self._read_again(first, Rest(position, position, tuple(sorted(returned))))

    def _read_again(self, first: Order, rest: Rest) -> Iterator[Taken]:
        """Yields the batches of the places that came back; the stream is read again for them, in their order."""
        plan = list(shares(0, len(rest), first.deal))
        picked = [tuple(rest.returned[at] for at in share.places) for share in plan]
        self._orders.upcoming = [
            Order(first.reading, first.epoch, places[0], Bookmark(places[0]), first.deal, places) for places in picked
        ]
        used = 0
        for share, served in zip(plan, self._loader, strict=True):
            yield Taken(served.batch, first.start, rest.after(used), share.end - used)
            used = share.end


class _Orders:
    """What the DataLoader is asked for, perhaps without end."""

    upcoming: Iterable[Order]

    def __iter__(self) -> Iterator[Order]:
        return iter(self.upcoming)


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
            samples = reader.pick(order.picked) if order.picked else reader.take(order.deal, before)
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
