"""The rounds of an elastic training run. In each round, the members of the view agree on a sum over all shards.

Each member computes the sums of its tree nodes and *keeps* them. The members add up these sums, each in its own memory,
and compare digests of the result and of a part of their state. If all are equal, the round is *committed*. If the view
breaks at any point, each survivor enters the next view with the sums that it holds, and `agreement.py` determines how
to continue. A shard's value is a pure function of the shard, so a repeated computation yields the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.spans import STEPS
from paceline.train.elastic import agreement
from paceline.train.elastic.agreement import BatchAssignments, ViewChange
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.launcher_connection import LauncherConnection
from paceline.train.elastic.protocol import OUTVOTED, LoopFinished
from paceline.train.elastic.state_transfer.optimizer_steps import OptimizerStepHooks
from paceline.train.elastic.training_state import TrainingState
from paceline.train.elastic.worker.progress import WorkerProgress
from paceline.train.elastic.worker.vote import Audit, Ballot, OutvotedError, audit_of, vote
from paceline.train.elastic.worker.worker_membership import WorkerMembership
from paceline.train.logical_shards.tree_sum import Values, sum_over_ranks
from paceline.train.module_tensors import digest_of


class Rounds:
    """Runs the rounds of one worker through all its views.

    Args:
        shards: The number of shards in a step.
        connection: The worker's connection to its launcher.
        registry: The state that a joining worker receives.
        on_deal: A function that is called with this worker's shards whenever they may have changed.
        steps: The hooks for the optimizer steps of a DDP loop, or None for other loops; see `WorkerMembership`.
    """

    def __init__(
        self,
        shards: int,
        connection: LauncherConnection,
        registry: TrainingState,
        on_deal: Callable[[range], None],
        steps: OptimizerStepHooks | None = None,
    ) -> None:
        self._connection = connection
        self._registry = registry
        self._on_deal = on_deal
        self._progress = WorkerProgress(shards)
        self._membership = WorkerMembership(connection, registry, self._progress, steps)
        self._agreed = 0  # number of the latest view or transfer on which all members can act
        self.on_dismissed: Callable[[], None] | None = None  # called between batches before this worker is dismissed

    @property
    def number(self) -> int:
        """The next round's number."""
        return self._progress.number

    @property
    def assignments(self) -> BatchAssignments:
        """The assignments of batches to members."""
        return self._progress.assignments

    @property
    def is_replaying(self) -> bool:
        """Whether this worker is catching up with the others."""
        return self._membership.catching_up is not None

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of the current view, or None."""
        return self._membership.group

    def join(self, fingerprint: str, *, replays: bool) -> None:
        """Requests to join; returns when this worker has the state and is either in a view or about to catch up.

        `replays` is True if this worker may catch up while the others train. Raises SystemExit if the launcher
        dismisses the worker.
        """
        failpoint("join.ready")
        self._membership.begin(fingerprint, can_catch_up=replays)
        self._announce_shards()

    def leave(self) -> None:
        """Records that this worker was asked to exit. If a later view excludes this worker, it exits with code 0."""
        self._membership.is_leaving = True

    def total(self, value_of: Callable[[int], Values], is_step: bool = False) -> Values:
        """Runs a round; returns the sum of `value_of` over all shards.

        If `is_step`, the round is a training step: the time per shard is measured, and some rounds are audited. Raises
        DivergenceError if the members' results or states differ, and SystemExit if this worker is not in the next view.
        """
        if is_step:
            STEPS.begin(self, "elastic", precedence=1)
        return self._round(lambda group: self._sum(group, value_of, is_step))

    def agree_on(self, compute: Callable[[ProcessGroup], Values]) -> Values:
        """Runs a round; returns the result of `compute`, which communicates with the members of the view.

        If the view breaks, `compute` is called again in the next view, so it must not modify its inputs. Raises the
        same errors as `total`.
        """
        return self._round(lambda group: self._agreed_on(group, compute(group), None))

    def begin_batch(self) -> ViewChange | None:
        """Enters the next view if all members are ready for it. The caller must be between two batches.

        Returns the change in workers since the last batch, which is the same on every member. Raises SystemExit if the
        next view does not contain this worker, or the launcher dismissed it.
        """
        failpoint("batch.begun")
        progress, membership = self._progress, self._membership

        def attempt() -> None:
            agreed = self._connection.view_until(self._agreed)
            if agreed is not None and agreed.generation > membership.view.generation:
                membership.enter(agreed)
            # If another member has begun the batch, the members must finish it even if there are too few of them.
            while membership.group is None or (membership.view.must_wait and not progress.others_have):
                membership.enter_next_view()

        progress.has_begun = False
        if membership.catching_up is not None:
            if (dealt := membership.catching_up.until_batch(progress.number)) is not None:
                progress.has_begun = True
                progress.assignments.merge([dealt], is_new=False)
                membership.watch(dealt)
                return progress.assignments.begin(progress.number, dealt.members)
            membership.catching_up = None
        if (order := self._connection.dismissed) is not None:  # all members leave, or the job has ended
            if self.on_dismissed is not None:
                self.on_dismissed()
            membership.end(order.reason, order.code)
        membership.sender.begin_batch(self._agreed, progress.number, progress.committed, progress.assignments.latest)
        membership.retry_until_view_holds(attempt)
        progress.has_begun = True
        self._announce_shards()
        return progress.assignments.begin(progress.number, membership.view.members)

    def finish(self) -> None:
        """Runs a final round, after which the members no longer need each other."""
        self.total(lambda _: [torch.zeros(1, dtype=torch.uint8, device="cpu")])
        if self._membership.catching_up is not None:
            self._membership.catching_up.give_up("the others have finished")
        self._membership.finish()
        failpoint("loop.over")
        self._connection.send(LoopFinished(self.number))

    def _round(self, agreed_result: Callable[[ProcessGroup], Values]) -> Values:
        progress, membership = self._progress, self._membership

        def attempt() -> Values:
            if membership.group is None:
                membership.enter_next_view()
            group = membership.group
            assert group is not None
            return progress.voted if progress.is_late else agreed_result(group)

        failpoint("round.begun")
        progress.state = self._registry.rolling_digest(progress.number)
        result: Values
        if membership.catching_up is not None:
            result, progress.digest = membership.catching_up.result(progress.number, progress.state)
        else:
            result = membership.retry_until_view_holds(attempt)
        membership.sender.committed(
            progress.number, result, progress.digest, progress.state, progress.committed, progress.assignments.latest
        )
        progress.commit(is_replay=self.is_replaying)
        return result

    def _sum(self, group: ProcessGroup, value_of: Callable[[int], Values], is_step: bool) -> Values:
        progress, deal = self._progress, self._progress.shard_assignment.deal
        audit = audit_of(progress.number, deal, progress.shards) if is_step else None
        progress.mine.compute(deal, group.rank(), value_of, audit, is_step=is_step)
        failpoint("round.computed")
        return self._agreed_on(group, sum_over_ranks(progress.mine.held, deal, progress.shards, group), audit)

    def _agreed_on(self, group: ProcessGroup, result: Values, audit: Audit | None) -> Values:
        """Votes on a result, and returns it if all members have the same result and state."""
        failpoint("round.summed")
        progress, membership = self._progress, self._membership
        progress.voted, progress.digest = result, digest_of(result)
        mine = Ballot(
            progress.digest, progress.state, membership.ready_until(), progress.mine.shard_ns, progress.mine.audited
        )
        try:
            guests = membership.agreed.guests(progress.number)
            ballots = vote(group, mine, progress.number, membership.view.members, audit, guests)
        except OutvotedError as error:
            membership.end(str(error), OUTVOTED)
        self._agreed = min(ballot.ready for ballot in ballots)
        if progress.number % agreement.REBALANCE_EVERY == 0:
            shard_ns = [ballot.shard_ns for ballot in ballots]
            if progress.shard_assignment.adapt(shard_ns) and group.rank() == 0:
                counts = progress.shard_assignment.counts
                taken = ", ".join(f"{time_ns / 1e6:.1f}" for time_ns in shard_ns)
                sys.stderr.write(f"paceline: the numbers of shards are now {counts}, because one takes {taken} ms\n")
        failpoint("round.voted")
        return result

    def _announce_shards(self) -> None:
        """Announces this worker's shards in later rounds, which may differ from those of the current round."""
        if self.is_replaying:
            self._on_deal(range(0))
            return
        members = self._membership.view.members
        self._on_deal(self._progress.shard_assignment.of(members.index(self._connection.name)))
