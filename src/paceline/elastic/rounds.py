"""The rounds of an elastic training run: each is a sum over all shards, to which every member of the view agrees.

The life of a round. A member computes the sums of its nodes and *keeps* them. The members add them up into a result
in memory of its own, and compare digests of it and of a part of their state; if all are equal, the round is
*committed*. If the view breaks at any point, each survivor enters the next view with what it has; `agreement.py` says
what follows from that. What a member does again is a pure function of the shard, so doing it again gives the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from paceline.elastic import speeds
from paceline.elastic.agreement import FRESH, NOTHING_AGREED, Agreement, Status, agree
from paceline.elastic.audit import Audit, audit_of
from paceline.elastic.computing import Computing
from paceline.elastic.connection import LauncherConnection
from paceline.elastic.dealings import Dealings, ViewChange
from paceline.elastic.failpoints import reach
from paceline.elastic.handing_over import HandingOver
from paceline.elastic.joining.catching_up import CatchingUp
from paceline.elastic.joining.course import StrayedError
from paceline.elastic.joining.donors import Donor
from paceline.elastic.joining.following import Following
from paceline.elastic.joining.learner import Taught
from paceline.elastic.joining.newcomer import Newcomer
from paceline.elastic.joining.priority import at_low_priority
from paceline.elastic.joining.replay import LostDonorsError
from paceline.elastic.joining.steps import Steps
from paceline.elastic.meeting import LOST, Meeting, exchange_statuses
from paceline.elastic.messages import LEFT_OUT, OUTVOTED, Broken, Dismissed, Finished, Installed, View
from paceline.elastic.portions import Portions
from paceline.elastic.registry import Registry
from paceline.elastic.vote import Ballot, OthersOutvotedError, OutvotedError, vote
from paceline.group.process_group import ProcessGroup
from paceline.parallel.digests import digest_of
from paceline.parallel.sharded.sums import Values, sum_over_ranks
from paceline.record.names import EventKind
from paceline.record.spans import Recorded
from paceline.record.steps import STEPS


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
        registry: Registry,
        on_deal: Callable[[range], None],
        steps: Steps | None = None,
    ) -> None:
        self._shards = shards
        self._connection = connection
        self._registry = registry
        self._on_deal = on_deal
        self._meeting = Meeting(connection)
        self._newcomer = Newcomer(connection)
        self._steps = steps
        self._donor = Donor(connection, registry, steps)
        self._catching_up: CatchingUp | None = None  # with the others, who have committed later rounds
        self._following: Following | None = None  # the same in the usual loop, before the script's loop begins
        self._view = View(0, (), is_planned=False)
        self._group: ProcessGroup | None = None
        self.number = FRESH  # the round that comes next
        self._portions = Portions(shards)
        self._entered = NOTHING_AGREED  # what the members of this view have agreed on
        self.dealings = Dealings()
        self._mine = Computing()
        self._voted: Values = []  # the result with which this worker has voted in this round
        self._digest = 0  # of that
        self._state = 0  # the digest of a part of the state at the beginning of this round
        self._committed = 0  # the digest of the result of the round before
        self._is_late = False  # others have committed this round already, with that result
        self._has_begun = False  # this worker is in a batch
        self._others_have = False  # a member that is in the same round has begun its batch
        self._guest_until = 0  # the round before which this worker is a guest, see `Status`
        self.is_leaving = False  # this worker was asked to end
        self.on_dismissed: Callable[[], None] | None = None  # is called between batches before the job ends for all
        self._agreed = 0  # the generation of a view that all members have heard of

    @property
    def is_replaying(self) -> bool:
        """Whether this worker catches up with the others."""
        return self._catching_up is not None

    def join(self, fingerprint: str, *, replays: bool) -> None:
        """Asks to take part, and returns when this worker has the state, and is in a view or about to catch up.

        Args:
            fingerprint: see `Ready`.
            replays: the loop may be run on the results of others until this worker has caught up with them.

        Raises:
            SystemExit: the launcher says that the worker takes no part.
        """
        reach("join.ready")
        self._newcomer.ask(fingerprint, learns=replays)
        self._until_it_holds(self._enter_next)
        self._tell_deal()

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

    def _round(self, agreed_result: Callable[[ProcessGroup], Values]) -> Values:
        def attempt() -> Values:
            if self._group is None:
                self._enter_next()
            return self._voted if self._is_late else agreed_result(self._group_now())

        reach("round.begun")
        self._state = self._registry.rolling_digest(self.number)
        result: Values
        if self._catching_up is not None:
            result, self._digest = self._catching_up.result(self.number, self._state)
        else:
            result = self._until_it_holds(attempt)
        self._donor.committed(self.number, result, self._digest, self._state, self._committed, self.dealings.latest)
        self._commit()
        return result

    def begin_batch(self) -> ViewChange | None:
        """Enters the next view if all members have heard of it; the state belongs to no batch here.

        Returns:
            Who has come and gone since the last batch, the same on every member; None if nobody has.

        Raises:
            SystemExit: this worker is not in that view.
        """
        reach("batch.begun")

        def attempt() -> None:
            agreed = self._connection.view_until(self._agreed)
            if agreed is not None and agreed.generation > self._view.generation:
                self._enter(agreed)
            # A batch that another member has begun is finished, however few the members are.
            while self._group is None or (self._view.must_wait and not self._others_have):
                self._enter_next()

        self._has_begun = False
        if self._catching_up is not None:
            if (dealt := self._catching_up.until_batch(self.number)) is not None:
                self._has_begun = True
                self.dealings.learn([dealt], is_new=False)
                return self.dealings.begin(self.number, dealt.members)
            self._catching_up = None
        if (order := self._connection.dismissed) is not None:  # all leave, so that no view follows; or the job is over
            if self.on_dismissed is not None:
                self.on_dismissed()
            self._end(order.reason, order.code)
        self._donor.begin_batch(self._agreed, self.number, self._committed, self.dealings.latest)
        self._until_it_holds(attempt)
        self._has_begun = True
        self._tell_deal()
        return self.dealings.begin(self.number, self._view.members)

    def finish(self) -> None:
        """Returns when every member has finished all rounds, so that none needs another any more."""
        self.total(lambda _: [torch.zeros(1, dtype=torch.uint8)])
        if self._catching_up is not None:
            self._catching_up.give_up("the others have finished")
        self._donor.close()
        reach("loop.over")
        self._connection.send(Finished(self.number))

    def _until_it_holds(self, attempt: Callable[[], Any]) -> Any:
        """Returns the result of `attempt` in the first view that lasts as long as it takes."""
        while True:
            try:
                return attempt()
            except (*LOST, OthersOutvotedError) as error:
                if self._group is not None or self._view.generation:
                    self._connection.send(Broken(self._view.generation, self.number, str(error)))
                self._group = None

    def _enter_next(self) -> None:
        while True:
            answer: View | Dismissed | Taught
            if self.number == FRESH:
                answer = self._newcomer.await_way_in(self._view.generation)
            else:
                answer = self._connection.await_view(self._view.generation, self._may_enter)
            if isinstance(answer, Dismissed):
                self._end(answer.reason, answer.code)
            if isinstance(answer, Taught):
                if self._begin_catching_up(answer):
                    return
                continue
            if self.number != FRESH or self._connection.name in answer.members:
                self._enter(answer)
                return
            # The view that this newcomer was to enter broke before it had the state: it asks again.
            self._view = answer
            self._newcomer.ask_again()

    def _may_enter(self, view: View) -> bool:
        """Whether this worker may enter a view that it has heard of, since it has lost the one before or is new.

        A planned view is for members that have all arrived at the beginning of a batch: those that wait there for more
        workers, and newcomers. A worker that has lost its view does not know where the others are, and waits for a
        forced one.
        """
        if self.number == FRESH:
            return True
        return not view.is_planned or (self._group is not None and self._view.must_wait)

    def _enter(self, view: View) -> None:
        before, self._view, self._group, self._is_late = self._view, view, None, False
        if self._connection.name not in view.members:
            code = 0 if self.is_leaving else LEFT_OUT
            self._end(f"it is not in view {view.generation}, which follows view {before.generation}", code)
        self._donor.entering(self.number, view)
        reach("view.entering")
        name = "planned" if view.is_planned else "forced"
        with Recorded(EventKind.VIEW_CHANGE, name, view.generation, len(view.members)):
            self._enter_with_others(view)

    def _enter_with_others(self, view: View) -> None:
        group = self._meeting.enter(view)
        reach("view.formed")
        statuses = exchange_statuses(group, self._status())
        agreed = agree(statuses, self._shards)
        self._others_have = any(status.has_begun for status in statuses if status.round == agreed.round)
        self.dealings.learn([status.dealt for status in statuses], is_new=self.number == FRESH)
        self._share(group, agreed, statuses)
        self._guest_until = agreed.guest_until[group.rank()] if agreed.guest_until else 0
        # Nobody begins a batch before everybody has the state, so that whoever gives it is at the beginning of one.
        group.barrier()
        reach("view.agreed")
        self._portions.enter(statuses, agreed)
        self._entered, self._group = agreed, group
        self._connection.send(Installed(view.generation, self.number))

    def _status(self) -> Status:
        dealt = self.dealings.latest
        if self.number == FRESH and self._following is not None and not self._following.has_strayed:
            return self._following.status(dealt)
        held = tuple((node.first, node.stop) for node in self._mine.held)
        return Status(
            self.number,
            held,
            self._mine.shard_ns,
            dealt,
            self._has_begun,
            self._digest,
            self._committed,
            teaches=self._donor.teaches,
            guest_until=self._guest_until,
        )

    def _share(self, group: ProcessGroup, agreed: Agreement, statuses: Sequence[Status]) -> None:
        """Gives the state to those that lack it; learns that others have committed what this worker has voted for."""
        rank, handing_over = group.rank(), HandingOver(self._registry, group, self._steps)
        handing_over.give(agreed, statuses)
        if (source := agreed.source[rank]) is not None:
            handing_over.take(source, statuses[rank], self._following if rank in agreed.followers else None)
            self._committed = agreed.committed
            if self._following is not None:
                self._following.holds = agreed.round
        if rank in agreed.outvoted:
            self._end(f"the others have committed another result of round {self.number} than its own", OUTVOTED)
        if rank in agreed.late:
            self._is_late = True
            reach("result.taken")
        else:
            self.number = agreed.round

    def _sum(self, group: ProcessGroup, value_of: Callable[[int], Values], is_step: bool) -> Values:
        deal = self._portions.deal
        audit = audit_of(self.number, deal, self._shards) if is_step else None
        self._mine.compute(deal, group.rank(), value_of, audit, is_step=is_step)
        reach("round.computed")
        return self._agreed_on(group, sum_over_ranks(self._mine.held, deal, self._shards, group), audit)

    def _agreed_on(self, group: ProcessGroup, result: Values, audit: Audit | None) -> Values:
        reach("round.summed")
        self._vote(group, result, audit)
        reach("round.voted")
        return result

    def _vote(self, group: ProcessGroup, result: Values, audit: Audit | None) -> None:
        self._voted, self._digest = result, digest_of(result)
        mine = Ballot(self._digest, self._state, self._connection.heard, self._mine.shard_ns, self._mine.audited)
        try:
            guests = self._entered.guests(self.number)
            ballots = vote(group, mine, self.number, self._view.members, audit, guests)
        except OutvotedError as error:
            self._end(str(error), OUTVOTED)
        self._agreed = min(ballot.heard for ballot in ballots)
        if self.number % speeds.EVERY == 0:
            shard_ns = [ballot.shard_ns for ballot in ballots]
            if self._portions.adapt(shard_ns) and group.rank() == 0:
                counts, taken = self._portions.counts, ", ".join(f"{each / 1e6:.1f}" for each in shard_ns)
                sys.stderr.write(f"paceline: shards are now dealt {counts}, since one takes {taken} ms\n")

    def _commit(self) -> None:
        was_late, self._is_late = self._is_late, False
        self._voted = []
        self._mine.forget()
        self._committed, self._digest = self._digest, 0
        self.number += 1
        # One that was late has agreed with the others on the round that comes now when it entered the view.
        if not was_late and self._catching_up is None:
            self._portions.begin_round()
            self._others_have = False
        reach("round.committed")

    def _tell_deal(self) -> None:
        """Announces the shards of this worker in rounds to come; those that it owes in this round may be others."""
        if self._catching_up is not None:
            self._on_deal(range(0))
            return
        self._on_deal(self._portions.of(self._view.members.index(self._connection.name)))

    def _group_now(self) -> ProcessGroup:
        assert self._group is not None
        return self._group

    def _begin_catching_up(self, taught: Taught) -> bool:
        """Takes over a snapshot, and in the usual loop follows the others; returns False if that led nowhere."""
        at_low_priority(lambda: self._registry.restore(taught.take_state()))
        reach("join.restored")
        contents = taught.contents
        self.dealings.learn([contents.dealt], is_new=True)
        if self._steps is not None:
            return self._follow(taught, self._steps)
        self.number, self._committed = contents.round, contents.committed
        self._catching_up = CatchingUp(self._connection, taught, self._enter, self._end)
        self._meeting.watch_only(len(contents.dealt.members))
        return True

    def _follow(self, taught: Taught, steps: Steps) -> bool:
        """Makes the others' steps until this worker is in a view; returns False, and asks again, if it cannot."""
        following = Following(self._connection, taught, self._enter_after, self._end, self._registry, steps)
        self._following = following
        try:
            following.until_admitted()
        except (StrayedError, LostDonorsError):
            self.number = FRESH
            self._newcomer.has_failed(may_learn=not following.has_strayed)
            return False
        finally:
            self._following = None
        return True

    def _enter_after(self, view: View) -> None:
        """Enters a view as one that has followed the others, and perhaps was left out of the view before."""
        if self._following is not None and self._following.holds == FRESH:
            self.number = FRESH
        self._enter(view)

    def _end(self, reason: str, code: int) -> NoReturn:
        self._donor.close()
        self._meeting.leave()
        sys.stderr.write(f"paceline: {self._connection} ends: {reason}\n")
        raise SystemExit(code)
