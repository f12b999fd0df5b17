"""Which shards each member of a view computes: in the round at hand, and in those that follow."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.agreement import Agreement, Deal, Status, deal_runs
from paceline.elastic.speeds import even_counts, fair_counts


class Portions:
    """The portions of the members, by rank; all members work out the same ones.

    A round that one view has begun and another one finishes is dealt out by what the members still have of it. Every
    other round is dealt out in runs of consecutive shards.

    Attributes:
        deal: the nodes of each rank in the round at hand.
        counts: the number of shards of each rank in rounds to come.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.deal: Deal = []
        self.counts: list[int] = []

    def enter(self, statuses: Sequence[Status], agreed: Agreement) -> None:
        """Takes over what the members of a new view have agreed on, given what each has said about itself."""
        even = even_counts(self._shards, len(statuses))
        self.counts = fair_counts(self._shards, [status.shard_ns for status in statuses], even)
        self.deal = agreed.deal if any(status.held for status in statuses) else deal_runs(self.counts)

    def adapt(self, shard_ns: Sequence[int]) -> bool:
        """Fits the rounds to come to how long a shard takes on each rank; returns whether that changes a portion."""
        counts = fair_counts(self._shards, shard_ns, self.counts)
        has_changed = counts != self.counts
        self.counts = counts
        return has_changed

    def begin_round(self) -> None:
        """Deals out a new round."""
        self.deal = deal_runs(self.counts)

    def of(self, rank: int) -> range:
        """Returns the shards of a rank in rounds to come."""
        first = sum(self.counts[:rank])
        return range(first, first + self.counts[rank])
