"""The coordinator's state for an elastic job: its settings, the known state of the job, and the pending orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.train.elastic.coordinator.views import Views
from paceline.train.elastic.coordinator.worker_registry import WorkerPhase, WorkerRecord, WorkerRegistry
from paceline.train.elastic.protocol import (
    CoordinatorOrder,
    EndOrder,
    ExitRequest,
    NotifyOrder,
    SendOrder,
    StateTransfer,
    ToWorker,
    TransferReady,
)


@dataclass(frozen=True)
class CoordinatorPolicy:
    """The coordinator's settings. Only tests need values other than the defaults. All times are in seconds.

    Attributes:
        min_workers: The minimum number of members. If there are fewer, they finish their batch and wait.
        max_machines: The maximum number of machines that participate at the same time; additional machines stand by.
        start_patience_s: The time for which the first view waits for all workers once `min_workers` are ready.
        gather_s: The time for which a ready worker waits for others that may become ready at about the same time.
        break_patience_s: The time to wait for a death that explains a report of broken connections.
        most_breaks: The number of breaks within `breaks_within_s` that the job tolerates without a death or a committed
            round between them. The next break ends the job.
        breaks_within_s: The period to which `most_breaks` applies.
        hope_s: The time to wait for newcomers to report that they hold the state, after all known holders have died.
        quorum_timeout_s: The time for which a coordinator waits for a quorum.
        join_timeout_s: The time for which the job waits for `min_workers`.
        return_patience_s: The time from the last contact until an unreachable machine's workers are removed from the
            view, unless workers report broken connections earlier.
        quiet_s: The time for which the first view is delayed, to wait for reports of another running job.
        follow_patience_s: The time for which a new coordinator waits for a machine to reconnect before it excludes the
            machine's workers.
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
    """A worker's report of broken connections, which causes a forced view at `due_s`."""

    generation: int
    due_s: float


@dataclass
class ConnectionFailures:
    """The unanswered reports of broken connections, and the forced views that had no other cause."""

    waiting: dict[str, ConnectionFailure] = field(default_factory=dict)  # unanswered reports, by the reporting worker
    reasons: dict[str, str] = field(default_factory=dict)
    round: int = -1
    _forced_s: list[float] = field(default_factory=list)  # times of the forced views since the last committed round

    def committed(self, round_: int) -> None:
        """Records the number of rounds that a worker has committed."""
        if round_ > self.round:
            self.round = round_
            self._forced_s.clear()
            self.reasons.clear()

    def reported(self, uid: str, what: ConnectionFailure, reason: str) -> None:
        """Adds a report. A second report by the same worker does not restart the wait."""
        self.reasons[uid] = reason
        due_s = min(what.due_s, self.waiting.get(uid, what).due_s)
        self.waiting[uid] = ConnectionFailure(what.generation, due_s)

    def answered(self) -> None:
        """Discards the reports once a forced view has been issued."""
        self.waiting.clear()

    def are_too_many(self, policy: CoordinatorPolicy, now_s: float) -> bool:
        """Counts a forced view that no death explains; returns whether the job should give up."""
        self._forced_s = [forced_s for forced_s in self._forced_s if now_s - forced_s < policy.breaks_within_s] + [
            now_s
        ]
        return len(self._forced_s) > policy.most_breaks


@dataclass
class ElasticJob:
    """The known state of a job, and the pending orders.

    Attributes:
        policy: The coordinator's settings.
        began_s: The time at which the job began.
        registry: The records of machines and workers.
        views: The views that were issued.
        breaks: The reports of broken connections.
        over: The order that ended the job, or None.
        fingerprint: The fingerprint that all members share, or None before the first view.
        finished: The workers that have completed their training loop.
        ending_s: The time at which the first worker finished, or None.
        leaving_s: The time at which all members had been asked to leave, or None.
        few_s: The time at which the number of members became too small, or None.
        held: The message that lists the workers that the job is waiting for, or None.
        held_s: The time at which the wait for these workers began.
        due_s: The times at which the state must be evaluated again if no event arrives.
        orders: The pending orders.
        is_shared: Whether other launchers may have to take over as coordinator.
        withheld: The recipients of the latest view, or None once enough launchers have stored the view.
        lacks_quorum: Whether the job is waiting for members without which it must not continue.
        transfers: An earlier coordinator's transfers to receivers that have not reported yet, by receiver.
        transfer_offers: The senders' replies, by transfer and sender.
        must_move: Whether the members must change to another store, because the store of the latest view is about to
            close.
        identity: An identifier that distinguishes this job from all others.
        quiet_until_s: The earliest time for the first view.
    """

    policy: CoordinatorPolicy
    began_s: float
    registry: WorkerRegistry
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
    _last_text: str = ""

    def say(self, text: str) -> None:
        """Adds a sentence for the user, unless it repeats the previous one."""
        if text != self._last_text:
            self._last_text = text
            self.orders.append(NotifyOrder(text))

    def tell(self, worker: WorkerRecord, message: ToWorker) -> None:
        """Adds a message for a worker, if the worker is reachable."""
        if worker.lives and worker.machine.is_reachable:
            self.orders.append(SendOrder(worker.machine.name, worker.uid, message))

    def dismiss(self, worker: WorkerRecord, reason: str, code: int = 0) -> None:
        """Orders a worker to exit."""
        worker.phase = WorkerPhase.DISMISSED
        self.tell(worker, ExitRequest(reason, code))

    def give(self, members: Sequence[WorkerRecord], *, is_planned: bool) -> None:
        """Issues the next view, and sends it to the members and to the workers that the view excludes."""
        outside = (
            [worker for worker in self.registry.workers.values() if worker.phase is WorkerPhase.OUTSIDE]
            if self.is_shared
            else []
        )
        recipients = {worker.uid: worker for worker in [*members, *self.views.concerned, *outside]}
        must_wait = len(members) < self.policy.min_workers and self.ending_s is None
        self.views.give(members, is_planned=is_planned, must_wait=must_wait)
        if not is_planned:
            self.breaks.answered()
        self.withheld = list(recipients.values())
        self.release()

    def release(self) -> None:
        """Sends the latest view if every later coordinator would also hold the view."""
        view = self.views.latest
        if view is None or self.withheld is None:
            return
        if self.is_shared and self.ending_s is None and not self.views.is_known():
            return
        recipients, self.withheld = self.withheld, None
        for worker in recipients:
            self.tell(worker, view)

    def remind(self, worker: WorkerRecord) -> None:
        """Repeats the messages that a worker may have missed."""
        if worker.phase is WorkerPhase.DISMISSED:
            self.tell(worker, ExitRequest("the job no longer needs it"))
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
        """Returns the transfers whose receivers are not known to have caught up, oldest first."""
        receivers = [worker for worker in self.registry.workers.values() if worker.lives and not worker.has_state]
        found = [receiver.transfer for receiver in receivers if receiver.transfer is not None]
        return sorted([*found, *self.transfers.values()], key=lambda transfer: transfer.number)

    def end(self, end: EndOrder) -> None:
        """Ends the job."""
        self.over = end
        self.orders.append(end)

    def can_grow(self) -> bool:
        """Returns True if another worker may still join, as a replacement or from another machine."""
        return self.registry.begun() < self.policy.max_machines or self.registry.can_grow()
