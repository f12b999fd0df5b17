"""The rounds of an elastic training run: each is a sum over all shards, to which every member of the view agrees.

The life of a round. A member computes the sums of its nodes and *keeps* them. The members add them up into a result
in memory of its own, and compare digests of it and of a part of their state; if all are equal, the round is
*committed*. If the view breaks at any point, each survivor enters the next view with what it has; `agreement.py` says
what follows from that. What a member does again is a pure function of the shard, so doing it again gives the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.spans import STEPS
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.protocol import OUTVOTED, LoopFinished
from paceline.train.elastic.state_transfer.optimizer_steps import OptimizerStepHooks
from paceline.train.elastic.worker import agreement
from paceline.train.elastic.worker.agreement import BatchAssignments, ViewChange
from paceline.train.elastic.worker.launcher_connection import LauncherConnection
from paceline.train.elastic.worker.progress import WorkerProgress
from paceline.train.elastic.worker.training_state import TrainingState
from paceline.train.elastic.worker.vote import Audit, Ballot, OutvotedError, audit_of, vote
from paceline.train.elastic.worker.worker_membership import WorkerMembership
from paceline.train.logical_shards.tree_sum import Values, sum_over_ranks
from paceline.train.module_tensors import digest_of


class Rounds:
    """Runs the rounds of one worker, through all the views that it is in.

    Args:
        shards: the number of shards of a step.
        connection: the worker's connection to its launcher.
        registry: the state, which a worker that joins is given.
        on_deal: is called with this worker's shards whenever they change.
        steps: of the usual loop, which a worker that joins makes again; it cannot run the loop itself on results.
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
        self._here = WorkerProgress(shards)
        self._participation = WorkerMembership(connection, registry, self._here, steps)
        self._agreed = 0  # up to this number, all members can act on views and transfers
        self.on_dismissed: Callable[[], None] | None = None  # is called between batches before the job ends for all

    @property
    def number(self) -> int:
        """The round that comes next."""
        return self._here.number

    @property
    def dealings(self) -> BatchAssignments:
        """To whom batches were dealt out."""
        return self._here.dealings

    @property
    def is_replaying(self) -> bool:
        """Whether this worker catches up with the others."""
        return self._participation.catching_up is not None

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of the current view; None while there is none."""
        return self._participation.group

    def join(self, fingerprint: str, *, replays: bool) -> None:
        """Asks to take part, and returns when this worker has the state, and is in a view or about to catch up.

        Args:
            fingerprint: see `Ready`.
            replays: the loop may be run on the results of others until this worker has caught up with them.

        Raises:
            SystemExit: the launcher says that the worker takes no part.
        """
        failpoint("join.ready")
        self._participation.begin(fingerprint, learns=replays)
        self._tell_deal()

    def leave(self) -> None:
        """Notes that this worker was asked to end, so that a view without it is no failure."""
        self._participation.is_leaving = True

    def total(self, value_of: Callable[[int], Values], is_step: bool = False) -> Values:
        """Runs a round; returns the sum over all shards, of which `value_of` computes any one.

        The rounds that are steps of the training show how fast the members are, and are audited.

        Raises:
            DivergenceError: the members' results or states differ.
            SystemExit: this worker is not in the next view.
        """
        if is_step:
            STEPS.begin(self, "elastic", precedence=1)
        return self._round(lambda group: self._sum(group, value_of, is_step))

    def agree_on(self, compute: Callable[[ProcessGroup], Values]) -> Values:
        """Runs a round; returns its result, which `compute` computes together with the members of a view.

        It is called again in the next view if this one breaks, so it must leave what it computes with as it is.

        Raises:
            DivergenceError: the members' results or states differ.
            SystemExit: this worker is not in the next view.
        """
        return self._round(lambda group: self._agreed_on(group, compute(group), None))

    def begin_batch(self) -> ViewChange | None:
        """Enters the next view if all members are ready for it; the state belongs to no batch here.

        Returns:
            Who has come and gone since the last batch, the same on every member; None if nobody has.

        Raises:
            SystemExit: this worker is not in that view.
        """
        failpoint("batch.begun")
        here, participation = self._here, self._participation

        def attempt() -> None:
            agreed = self._connection.view_until(self._agreed)
            if agreed is not None and agreed.generation > participation.view.generation:
                participation.enter(agreed)
            # A batch that another member has begun is finished, however few the members are.
            while participation.group is None or (participation.view.must_wait and not here.others_have):
                participation.enter_next_view()

        here.has_begun = False
        if participation.catching_up is not None:
            if (dealt := participation.catching_up.until_batch(here.number)) is not None:
                here.has_begun = True
                here.dealings.learn([dealt], is_new=False)
                participation.watch(dealt)
                return here.dealings.begin(here.number, dealt.members)
            participation.catching_up = None
        if (order := self._connection.dismissed) is not None:  # all leave, so that no view follows; or the job is over
            if self.on_dismissed is not None:
                self.on_dismissed()
            participation.end(order.reason, order.code)
        participation.sender.begin_batch(self._agreed, here.number, here.committed, here.dealings.latest)
        participation.retry_until_view_holds(attempt)
        here.has_begun = True
        self._tell_deal()
        return here.dealings.begin(here.number, participation.view.members)

    def finish(self) -> None:
        """Returns when every member has finished all rounds, so that none needs another any more."""
        self.total(lambda _: [torch.zeros(1, dtype=torch.uint8)])
        if self._participation.catching_up is not None:
            self._participation.catching_up.give_up("the others have finished")
        self._participation.finish()
        failpoint("loop.over")
        self._connection.send(LoopFinished(self.number))

    def _round(self, agreed_result: Callable[[ProcessGroup], Values]) -> Values:
        here, participation = self._here, self._participation

        def attempt() -> Values:
            if participation.group is None:
                participation.enter_next_view()
            return here.voted if here.is_late else agreed_result(self._group_now())

        failpoint("round.begun")
        here.state = self._registry.rolling_digest(here.number)
        result: Values
        if participation.catching_up is not None:
            result, here.digest = participation.catching_up.result(here.number, here.state)
        else:
            result = participation.retry_until_view_holds(attempt)
        participation.sender.committed(
            here.number, result, here.digest, here.state, here.committed, here.dealings.latest
        )
        here.commit(is_replay=self.is_replaying)
        return result

    def _sum(self, group: ProcessGroup, value_of: Callable[[int], Values], is_step: bool) -> Values:
        here, deal = self._here, self._here.portions.deal
        audit = audit_of(here.number, deal, here.shards) if is_step else None
        here.mine.compute(deal, group.rank(), value_of, audit, is_step=is_step)
        failpoint("round.computed")
        return self._agreed_on(group, sum_over_ranks(here.mine.held, deal, here.shards, group), audit)

    def _agreed_on(self, group: ProcessGroup, result: Values, audit: Audit | None) -> Values:
        failpoint("round.summed")
        self._vote(group, result, audit)
        failpoint("round.voted")
        return result

    def _vote(self, group: ProcessGroup, result: Values, audit: Audit | None) -> None:
        here, participation = self._here, self._participation
        here.voted, here.digest = result, digest_of(result)
        mine = Ballot(here.digest, here.state, participation.ready_until(), here.mine.shard_ns, here.mine.audited)
        try:
            guests = participation.agreed.guests(here.number)
            ballots = vote(group, mine, here.number, participation.view.members, audit, guests)
        except OutvotedError as error:
            participation.end(str(error), OUTVOTED)
        self._agreed = min(ballot.ready for ballot in ballots)
        if here.number % agreement.REBALANCE_EVERY == 0:
            shard_ns = [ballot.shard_ns for ballot in ballots]
            if here.portions.adapt(shard_ns) and group.rank() == 0:
                counts, taken = here.portions.counts, ", ".join(f"{each / 1e6:.1f}" for each in shard_ns)
                sys.stderr.write(f"paceline: shards are now dealt {counts}, since one takes {taken} ms\n")

    def _tell_deal(self) -> None:
        """Announces the shards of this worker in rounds to come; those that it owes in this round may be others."""
        if self.is_replaying:
            self._on_deal(range(0))
            return
        members = self._participation.view.members
        self._on_deal(self._here.portions.of(members.index(self._connection.name)))

    def _group_now(self) -> ProcessGroup:
        group = self._participation.group
        assert group is not None
        return group
