"""Where a worker is in the training: the round that comes next, and what it holds of it.

What a member computes in a round: the sums of its nodes, which it keeps until the round is committed.

Which shards each member of a view computes: in the round at hand, and in those that follow.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import RecordedSpan
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.worker.agreement import (
    FRESH,
    Agreement,
    BatchAssignments,
    Deal,
    MemberStatus,
    deal_runs,
    even_counts,
    fair_counts,
    smoothed,
)
from paceline.train.elastic.worker.vote import Audit
from paceline.train.logical_shards.tree_sum import Node, Values, add, add_up
from paceline.train.module_tensors import digest_of


class PartialSums:
    """The sums that a member holds.

    Attributes:
        held: by node.
        shard_ns: how long a shard takes here, 0 before any was computed.
        audited: the digest of the shard that is audited in this round, 0 if it was not computed here.
    """

    def __init__(self) -> None:
        self.held: dict[Node, Values] = {}
        self.shard_ns = 0
        self.audited = 0
        self._attempts = 0  # to compute this round

    def compute(
        self, deal: Deal, rank: int, value_of: Callable[[int], Values], audit: Audit | None, *, is_step: bool
    ) -> None:
        """Computes those sums of this rank that it does not hold; in a step, measures how long a shard takes."""
        began_ns = time.perf_counter_ns()
        missing = [node for node in deal[rank] if node not in self.held]
        is_again = bool(missing) and self._attempts > 0
        self._attempts += 1
        with RecordedSpan(EventKind.RECOMPUTE, "", len(missing)) if is_again else contextlib.nullcontext():
            for node in missing:
                self.held[node] = add_up(node, add, self._audited_value(value_of, audit), {})
        if is_step and missing:
            computed = sum(node.stop - node.first for node in missing)
            self.shard_ns = smoothed(self.shard_ns, (time.perf_counter_ns() - began_ns) // computed)
        if audit is not None and rank in audit.others:
            self.audited = digest_of(value_of(audit.shard))

    def forget(self) -> None:
        """Forgets the sums of a round that was committed."""
        self.held, self.audited, self._attempts = {}, 0, 0

    def _audited_value(self, value_of: Callable[[int], Values], audit: Audit | None) -> Callable[[int], Values]:
        """Returns `value_of`, which keeps a digest of the shard that is audited, if there is one."""
        if audit is None:
            return value_of

        def value_and_digest(shard: int) -> Values:
            value = value_of(shard)
            if shard == audit.shard:
                self.audited = digest_of(value)
            return value

        return value_and_digest


class ShardAssignment:
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

    def enter(self, statuses: Sequence[MemberStatus], agreed: Agreement) -> None:
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


class WorkerProgress:
    """Where one worker is; it lasts through all the views that the worker is in.

    Args:
        shards: the number of shards of a step.

    Attributes:
        shards: that number.
        number: the round that comes next, FRESH for a worker without state.
        dealings: to whom batches were dealt out.
        portions: which shards each member computes.
        mine: the sums that this worker has computed in this round.
        voted: the result with which it has voted in this round.
        digest: of that.
        state: the digest of a part of the state at the beginning of this round.
        committed: the digest of the result of the round before.
        is_late: others have committed this round already, with that result.
        has_begun: this worker is in a batch.
        others_have: a member that is in the same round has begun its batch.
        guest_until: the round before which this worker is a guest, see `Status`.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.number = FRESH
        self.dealings = BatchAssignments()
        self.portions = ShardAssignment(shards)
        self.mine = PartialSums()
        self.voted: Values = []
        self.digest = 0
        self.state = 0
        self.committed = 0
        self.is_late = False
        self.has_begun = False
        self.others_have = False
        self.guest_until = 0

    def status(self, *, teaches: bool) -> MemberStatus:
        """Returns what a member says about itself when it enters a view; `teaches` if it gives a transfer."""
        return MemberStatus(
            self.number,
            tuple((node.first, node.stop) for node in self.mine.held),
            self.mine.shard_ns,
            self.dealings.latest,
            self.has_begun,
            self.digest,
            self.committed,
            teaches=teaches,
            guest_until=self.guest_until,
        )

    def learn(self, agreed: Agreement, rank: int) -> None:
        """Takes over what the members of a new view have agreed on, when this worker has the state."""
        if rank in agreed.late:
            self.is_late = True
            failpoint("result.taken")
        else:
            self.number = agreed.round
        self.guest_until = agreed.guest_until[rank] if agreed.guest_until else 0

    def commit(self, *, is_replay: bool) -> None:
        """Goes on to the next round; a replayed one is another's."""
        was_late, self.is_late = self.is_late, False
        self.voted = []
        self.mine.forget()
        self.committed, self.digest = self.digest, 0
        self.number += 1
        # One that was late has agreed with the others on the round that comes now when it entered the view.
        if not was_late and not is_replay:
            self.portions.begin_round()
            self.others_have = False
        failpoint("round.committed")
