"""Deals out the batches of a dataset that can be indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from paceline.data.order import Deal, shares


class IndexedBatches:
    """The batches of an indexable dataset for one rank, read by a DataLoader."""

    def __init__(self, dataset: Dataset[Any], options: dict[str, Any]) -> None:
        self._indices = _Indices()
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._indices, **options)

    def read(self, count: int, index_of: Callable[[int], int], deal: Deal) -> Iterator[tuple[Any, int]]:
        """Yields the batches of `count` places, and where each batch's step ends.

        Nothing is listed beforehand, so that ranks which are dealt other parts go on at once, however long the epoch
        is. `index_of` returns the index of the sample in a place; it must not refer to what owns this, see `_Indices`.
        """
        self._indices.upcoming = ([index_of(place) for place in share.places] for share in shares(0, count, deal))
        # The DataLoader returns batches in the order in which it was asked for them.
        for share, batch in zip(shares(0, count, deal), self._loader, strict=True):
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
