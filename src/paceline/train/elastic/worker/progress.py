"""A worker's progress: its next round's number, its partial sums, and the assignment of shards to members."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import RecordedSpan
from paceline.train.elastic.agreement import (
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
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.worker.vote import Audit
from paceline.train.logical_shards.tree_sum import Node, Values, add, add_up
from paceline.train.module_tensors import digest_of, in_host_memory


class PartialSums:
    """The partial sums that a member has computed and keeps until their round is committed."""

    def __init__(self) -> None:
        self.held: dict[Node, Values] = {}  # by tree node; in host memory, because they are sent from there
        self.shard_ns = 0  # this worker's time per shard, or 0 before it has computed any shard
        self.audited = 0  # the digest of this round's audited shard, or 0 if this worker did not compute the shard
        self._attempts = 0  # number of attempts to compute this round

    def compute(
        self, deal: Deal, rank: int, value_of: Callable[[int], Values], audit: Audit | None, *, is_step: bool
    ) -> None:
        """Computes the audited shard and the sums that this rank lacks; in a step, measures the time per shard."""

        def audited_value_of(shard: int) -> Values:
            value = value_of(shard)
            if audit is not None and shard == audit.shard:
                self.audited = digest_of(value)
            return value

        began_ns = time.perf_counter_ns()
        missing = [node for node in deal[rank] if node not in self.held]
        is_again = bool(missing) and self._attempts > 0
        self._attempts += 1
        with RecordedSpan(EventKind.RECOMPUTE, "", len(missing)) if is_again else contextlib.nullcontext():
            for node in missing:
                total: Values = add_up(node, add, audited_value_of, {})
                self.held[node] = in_host_memory(total)
        if is_step and missing:
            computed = sum(node.stop - node.first for node in missing)
            self.shard_ns = smoothed(self.shard_ns, (time.perf_counter_ns() - began_ns) // computed)
        if audit is not None and rank in audit.others:
            self.audited = digest_of(value_of(audit.shard))

    def forget(self) -> None:
        """Discards the sums of a committed round."""
        self.held, self.audited, self._attempts = {}, 0, 0


class ShardAssignment:
    """The shards assigned to each member, by rank. All members compute the same assignment.

    For a round that began in an earlier view, the assignment depends on the sums that the members still hold. In all
    other rounds, each member has a run of consecutive shards.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.deal: Deal = []  # in the current round
        self.counts: list[int] = []  # the number of shards of each rank in later rounds

    def enter(self, statuses: Sequence[MemberStatus], agreed: Agreement) -> None:
        """Adopts the agreement between the members of a new view."""
        even = even_counts(self._shards, len(statuses))
        self.counts = fair_counts(self._shards, [status.shard_ns for status in statuses], even)
        self.deal = agreed.deal if any(status.held for status in statuses) else deal_runs(self.counts)

    def adapt(self, shard_ns: Sequence[int]) -> bool:
        """Adapts later rounds to each rank's time per shard; returns whether the counts have changed."""
        before, self.counts = self.counts, fair_counts(self._shards, shard_ns, self.counts)
        return self.counts != before

    def begin_round(self) -> None:
        """Assigns the shards of a new round."""
        self.deal = deal_runs(self.counts)

    def of(self, rank: int) -> range:
        """Returns the shards of a rank in later rounds."""
        first = sum(self.counts[:rank])
        return range(first, first + self.counts[rank])


class WorkerProgress:
    """The progress of one worker through all its views."""

    def __init__(self, shards: int) -> None:
        self.shards = shards  # the number of shards in a step
        self.number = FRESH  # the next round's number, or FRESH for a worker without state
        self.assignments = BatchAssignments()
        self.shard_assignment = ShardAssignment(shards)
        self.mine = PartialSums()
        self.voted: Values = []  # the result for which this worker voted in this round
        self.digest = 0  # the digest of `voted`
        self.state = 0  # the digest of a part of the state at the beginning of this round
        self.committed = 0  # the digest of the previous round's result
        self.is_late = False  # whether others have already committed this round with the result `voted`
        self.has_begun = False  # whether this worker is in the middle of a batch
        self.others_have = False  # whether any member of the view has begun the batch of the current round
        self.guest_until = 0  # the round before which this worker is a guest; see `MemberStatus`

    def status(self, *, is_sender: bool) -> MemberStatus:
        """Returns the status that a member sends when it enters a view; `is_sender` marks the sender of a transfer."""
        return MemberStatus(
            self.number,
            tuple((node.first, node.stop) for node in self.mine.held),
            self.mine.shard_ns,
            self.assignments.latest,
            self.has_begun,
            self.digest,
            self.committed,
            is_sender=is_sender,
            guest_until=self.guest_until,
        )

    def adopt(self, agreed: Agreement, rank: int) -> None:
        """Adopts the agreement between the members of a new view. This worker must have the state."""
        if rank in agreed.late:
            self.is_late = True
            failpoint("result.taken")
        else:
            self.number = agreed.round
        self.guest_until = agreed.guest_until[rank] if agreed.guest_until else 0

    def commit(self, *, is_replay: bool) -> None:
        """Advances to the next round. If `is_replay`, the round was computed by others."""
        was_late, self.is_late = self.is_late, False
        self.voted = []
        self.mine.forget()
        self.committed, self.digest = self.digest, 0
        self.number += 1
        # A late worker adopted the division of the next round when it entered the view.
        if not was_late and not is_replay:
            self.shard_assignment.begin_round()
            self.others_have = False
        failpoint("round.committed")
