"""The facts about an elastic job, and the orders that are being put together.

The settings of an elastic job's coordinator.

Reports of connections that broke: when they call for a forced view, and when there were too many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.train.elastic.coordinator.views import Views
from paceline.train.elastic.coordinator.worker_registry import WorkerPhase, WorkerRecord, WorkerRegistry
from paceline.train.elastic.protocol import (
    CoordinatorOrder,
    Dismissed,
    EndOrder,
    NotifyOrder,
    SendOrder,
    StateTransfer,
    ToWorker,
    TransferReady,
)


@dataclass(frozen=True)
class CoordinatorPolicy:
    """The numbers by which the coordinator decides; the defaults suit everything but tests.

    Attributes:
        min_workers: with fewer, the members finish their batch and wait.
        max_machines: further machines wait for a place.
        start_patience_s: how long the first view waits for all workers, once the first is ready and `min_workers` are.
        gather_s: how long a worker that is ready waits for others that may come at the same time.
        break_patience_s: how long a report of broken connections waits for the report of the death that explains it.
        most_breaks: the job ends after so many breaks in a row without a death and without a round committed...
        breaks_within_s: ... within so many seconds.
        hope_s: how long the last workers of a view are given to say whether they hold the state, when all that are
            known to hold it are dead.
        quorum_timeout_s: how long a coordinator that is cut off from too many members waits for them.
        join_timeout_s: how long the job waits for `min_workers`.
        return_patience_s: how long after it was heard of last the workers of a machine that cannot be reached are left
            out, unless workers report before that their connections broke.
        quiet_s: how long after the job began the first view waits for the news that another job runs already.
        follow_patience_s: how long a new coordinator gives machines to follow it, before it leaves their workers out.
    """

    min_workers: int = 1
    max_machines: int = 1 << 30
    start_patience_s: float = 10.0
    gather_s: float = 0.2
    break_patience_s: float = 0.3
    most_breaks: int = 5
    breaks_within_s: float = 30.0
    hope_s: float = 10.0
    quorum_timeout_s: float = 120.0
    join_timeout_s: float = 600.0
    return_patience_s: float = 0.0
    quiet_s: float = 0.0
    follow_patience_s: float = 0.5


@dataclass(frozen=True)
class ConnectionFailure:
    """A report that waits for a forced view."""

    generation: int
    due_s: float


@dataclass
class ConnectionFailures:
    """The reports that no view has answered yet, and the views that were forced for no other cause."""

    waiting: dict[str, ConnectionFailure] = field(default_factory=dict)  # by reporter
    reasons: dict[str, str] = field(default_factory=dict)
    round: int = -1
    _forced_s: list[float] = field(default_factory=list)  # since a round was committed

    def went_on(self, round_: int) -> None:
        """Takes the number of rounds that a worker has committed."""
        if round_ > self.round:
            self.round = round_
            self._forced_s.clear()
            self.reasons.clear()

    def reported(self, uid: str, what: ConnectionFailure, reason: str) -> None:
        """Takes a report; a second one of the same worker does not begin the wait anew."""
        self.reasons[uid] = reason
        due_s = min(what.due_s, self.waiting.get(uid, what).due_s)
        self.waiting[uid] = ConnectionFailure(what.generation, due_s)

    def answered(self) -> None:
        """Forgets the reporters, since a forced view was given."""
        self.waiting.clear()

    def are_too_many(self, policy: CoordinatorPolicy, now_s: float) -> bool:
        """Counts one more view that was forced without a death; returns whether the job should give up."""
        self._forced_s = [each for each in self._forced_s if now_s - each < policy.breaks_within_s] + [now_s]
        return len(self._forced_s) > policy.most_breaks


@dataclass
class ElasticJob:
    """What is known of a job.

    Attributes:
        began_s: when it began.
        over: how it ended.
        fingerprint: of the first view's members, and thus of all.
        finished: the workers that have finished.
        ending_s: since when there are any.
        leaving_s: since when all members have been asked to leave.
        few_s: since when there are fewer members than the job needs.
        held: for whom everybody waits, and why.
        held_s: since when.
        due_s: when the facts have to be looked at again, if nothing happens.
        orders: what is to be done.
        is_shared: other launchers may have to coordinate the job when this one is lost.
        withheld: who is told the latest view once enough launchers know of it; None if it was told.
        lacks_quorum: the job waits for members without whom it may not go on.
        transfers: of receivers that another coordinator has known, and that have not been heard of yet.
        transfer_offers: by transfer, what its senders have said.
        identity: tells this job from all others.
        quiet_until_s: no first view is given before.
        must_move: the members are to meet in another store, since the one of the latest view is about to end.
    """

    policy: CoordinatorPolicy
    began_s: float
    roster: WorkerRegistry
    views: Views
    breaks: ConnectionFailures = field(default_factory=ConnectionFailures)
    over: EndOrder | None = None
    fingerprint: str | None = None
    finished: list[WorkerRecord] = field(default_factory=list)
    ending_s: float | None = None
    leaving_s: float | None = None
    few_s: float | None = None
    held: str | None = None
    held_s: float = 0.0
    due_s: list[float] = field(default_factory=list)
    orders: list[CoordinatorOrder] = field(default_factory=list)
    is_shared: bool = False
    withheld: list[WorkerRecord] | None = None
    lacks_quorum: bool = False
    transfers: dict[str, StateTransfer] = field(default_factory=dict)
    transfer_offers: dict[int, dict[str, TransferReady]] = field(default_factory=dict)
    must_move: bool = False
    identity: str = ""
    quiet_until_s: float = 0.0
    _said: str = ""

    def say(self, text: str) -> None:
        """Adds a sentence for the user, unless it was the last one too."""
        if text != self._said:
            self._said = text
            self.orders.append(NotifyOrder(text))

    def tell(self, worker: WorkerRecord, message: ToWorker) -> None:
        """Adds a message for a worker that can be reached."""
        if worker.lives and worker.machine.is_reachable:
            self.orders.append(SendOrder(worker.machine.name, worker.uid, message))

    def dismiss(self, worker: WorkerRecord, reason: str, code: int = 0) -> None:
        """Tells a worker to end."""
        worker.place = WorkerPhase.DISMISSED
        self.tell(worker, Dismissed(reason, code))

    def give(self, members: Sequence[WorkerRecord], *, is_planned: bool) -> None:
        """Makes the next view, and tells it to its members and to those whom it leaves out."""
        outside = (
            [each for each in self.roster.workers.values() if each.place is WorkerPhase.OUTSIDE]
            if self.is_shared
            else []
        )
        told = {each.uid: each for each in [*members, *self.views.concerned, *outside]}
        must_wait = len(members) < self.policy.min_workers and self.ending_s is None
        self.views.give(members, is_planned=is_planned, must_wait=must_wait)
        if not is_planned:
            self.breaks.answered()
        self.withheld = list(told.values())
        self.release()

    def release(self) -> None:
        """Tells the latest view, once no other coordinator can come to its office without knowing of it."""
        view = self.views.latest
        if view is None or self.withheld is None or (self.is_shared and not self._may_tell()):
            return
        told, self.withheld = self.withheld, None
        for worker in told:
            self.tell(worker, view)

    def _may_tell(self) -> bool:
        return self.ending_s is not None or self.views.is_known()

    def remind(self, worker: WorkerRecord) -> None:
        """Tells a worker what it may have missed."""
        if worker.place is WorkerPhase.DISMISSED:
            self.tell(worker, Dismissed("the job does not need it any more"))
            return
        base, latest = self.views.base, self.views.latest
        if self.withheld is not None:
            self.withheld.append(worker)
            latest = None
        elif base is not None and base is not latest and worker.uid in base.members:
            self.tell(worker, base)
        if latest is not None:
            self.tell(worker, latest)
        for transfer in self.open_transfers() if worker in self.views.team else ():
            self.tell(worker, transfer)
        for offer in worker.offers:
            self.tell(worker, offer)

    def open_transfers(self) -> list[StateTransfer]:
        """Returns the transfers of those that have not caught up with the others, as far as is known, oldest first."""
        receivers = [each for each in self.roster.workers.values() if each.lives and not each.has_state]
        found = [each.transfer for each in receivers if each.transfer is not None]
        return sorted([*found, *self.transfers.values()], key=lambda each: each.number)

    def end(self, end: EndOrder) -> None:
        """Ends the job."""
        self.over = end
        self.orders.append(end)

    def can_grow(self) -> bool:
        """Returns whether a worker may yet come: a machine's next, or a further machine."""
        return self.roster.begun() < self.policy.max_machines or self.roster.can_grow()
