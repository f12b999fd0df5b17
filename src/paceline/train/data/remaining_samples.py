"""What is left of an epoch, and how a step of it is dealt out to ranks that may change between two batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.train.data.epoch_order import BatchSharding, Remainder
from paceline.train.data.stream_reader import StreamPosition


@dataclass(frozen=True)
class RemainingSamples:
    """The places of an epoch that are still to be used: those from `position` on, and then those that came back.

    >>> rest = RemainingSamples(position=6, length=8, returned=(2, 3))
    >>> rest.places(1, 4), rest.after(3)
    ([7, 2, 3], RemainingSamples(position=8, length=8, returned=(3,)))
    """

    position: int
    length: int
    returned: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Returns the number of places."""
        return self.length - self.position + len(self.returned)

    def place(self, at: int) -> int:
        """Returns one of the places.

        >>> rest = RemainingSamples(position=6, length=8, returned=(2, 3))
        >>> [rest.place(at) for at in range(len(rest))]
        [6, 7, 2, 3]
        """
        ahead = self.length - self.position
        return self.position + at if at < ahead else self.returned[at - ahead]

    def places(self, first: int, end: int) -> list[int]:
        """Returns a slice of the places."""
        ahead = self.length - self.position
        fresh = range(self.position, self.length)[first:end]
        return [*fresh, *self.returned[max(0, first - ahead) : max(0, end - ahead)]]

    def after(self, count: int) -> RemainingSamples:
        """Returns what is left when the first `count` places were used."""
        ahead = self.length - self.position
        return RemainingSamples(self.position + min(count, ahead), self.length, self.returned[max(0, count - ahead) :])

    def with_returned(self, places: Collection[int]) -> RemainingSamples:
        """Returns what is left if `places` come again at the end."""
        return RemainingSamples(self.position, self.length, (*self.returned, *places))


class ReadBatch(NamedTuple):
    """A batch that was read of a step, in which all ranks use the first `used` places of `before`.

    `bookmark` is a place in a stream that is not after the step.
    """

    batch: Any
    bookmark: StreamPosition
    before: RemainingSamples
    used: int


class RankSlot(NamedTuple):
    """One of the `ranks` that a batch is dealt out to; `rank` is None for one that has come too late for the batch."""

    ranks: int
    rank: int | None


@dataclass(frozen=True)
class EpochStep:
    """The first places of `before`, which a step deals out to `ranks` ranks."""

    before: RemainingSamples
    ranks: int
    count: int

    def places_of(self, rank: int) -> list[int]:
        """Returns what a rank uses; nothing if it only repeats what another one uses.

        >>> step = EpochStep(RemainingSamples(4, 9), ranks=3, count=2)
        >>> [step.places_of(rank) for rank in range(3)]
        [[4], [5], []]
        """
        run = BatchSharding(1, self.ranks, rank, "share").places(self.count)
        return self.before.places(run.start, run.stop)


def sharding_for(seat: RankSlot, batch_size: int, remainder: Remainder) -> BatchSharding:
    """Returns the deal by which this rank reads: every rank has a batch in every step, if only to repeat a sample."""
    return BatchSharding(batch_size, seat.ranks, seat.rank or 0, "drop" if remainder == "drop" else "repeat")


class BatchAssigner(Protocol):
    """Says, batch by batch, which ranks share an epoch, where ranks come and go."""

    def begin_batch(self) -> RankSlot:
        """Returns this rank's seat in the next batch."""
        ...

    def batch_delivered(self, *, counts: bool) -> None:
        """Is told that the loop gets its batch now, and whether its samples count or are another rank's."""
        ...

    def end_batch(self) -> None:
        """Is told that the loop asks for the next batch."""
        ...
