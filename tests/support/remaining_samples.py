"""A sampler and a worker that can stop before the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline import StatefulLoader
from paceline.train.data.epoch_order import RankSlot


class Dealt:
    """A sampler controlled by the test; `counts` is the loader's report about the latest batch."""

    def __init__(self) -> None:
        self.seat = RankSlot(1, 0)
        self.counts = False

    def begin_batch(self) -> RankSlot:
        return self.seat

    def batch_delivered(self, *, counts: bool) -> None:
        self.counts = counts

    def end_batch(self) -> None:
        """Records that the batch is complete."""


class Worker:
    """One rank's loader in the middle of an epoch."""

    def __init__(
        self, samples: int, remainder: str = "share", dataset: Callable[[int], object] = range, **options: object
    ) -> None:
        self.dealer = Dealt()
        self.loader = StatefulLoader(dataset(samples), 2, seed=5, remainder=remainder, **options)
        self.loader.use_batch_assigner(self.dealer)
        self.batches: Iterator[object] = iter(self.loader)

    def step(self, seat: RankSlot) -> list[int] | None:
        """Returns the samples in the next batch that are used, or None at the end of the epoch."""
        self.dealer.seat = seat
        batch = next(self.batches, None)
        return None if batch is None else batch.tolist() if self.dealer.counts else []
