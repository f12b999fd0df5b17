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
    """The coordinator's settings. Only tests need values other than the defaults."""

    min_workers: int = 1  # if there are fewer members, they finish their batch and wait
    max_machines: int = 1 << 30  # the number that participate at the same time; additional machines stand by
    start_patience_s: float = 10.0  # time for which the first view waits for all workers once `min_workers` are ready
    gather_s: float = 0.2  # time for which a ready worker waits for others that become ready at about the same time
    break_patience_s: float = 0.3  # time to wait for a death that explains a report of broken connections
    # The job ends at the next break after `most_breaks` within `breaks_within_s` without a death or a committed round.
    most_breaks: int = 5
    breaks_within_s: float = 30.0
    hope_s: float = 10.0  # time for newcomers to report that they hold the state, after all known holders have died
    quorum_timeout_s: float = 120.0  # time for which a coordinator waits for a quorum
    join_timeout_s: float = 600.0  # time for which the job waits for `min_workers`
    # The time from the last contact until an unreachable machine's workers are removed from the view, unless workers
    # report broken connections earlier.
    return_patience_s: float = 0.0
    quiet_s: float = 0.0  # time for which the first view waits for reports of another running job
    follow_patience_s: float = 0.5  # time after which a new coordinator excludes the workers on absent machines


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
        recent_s = [forced_s for forced_s in self._forced_s if now_s - forced_s < policy.breaks_within_s]
        self._forced_s = [*recent_s, now_s]
        return len(self._forced_s) > policy.most_breaks


@dataclass
class ElasticJob:
    """The known state of a job, and the pending orders."""

    policy: CoordinatorPolicy
    began_s: float
    registry: WorkerRegistry
    views: Views
    breaks: ConnectionFailures = field(default_factory=ConnectionFailures)
    over: EndOrder | None = None  # the order that ended the job
    fingerprint: str | None = None  # shared by all members; None before the first view
    finished: list[WorkerRecord] = field(default_factory=list)  # workers that have completed their training loop
    ending_s: float | None = None  # the time at which the first worker finished
    leaving_s: float | None = None  # the time at which all members had been asked to leave
    few_s: float | None = None  # the time at which the number of members became too small
    held: str | None = None  # the message that lists the workers that the job is waiting for
    held_s: float = 0.0  # the time at which the wait for these workers began
    due_s: list[float] = field(default_factory=list)  # times at which to evaluate the state even without an event
    orders: list[CoordinatorOrder] = field(default_factory=list)
    is_shared: bool = False  # whether other launchers may have to take over as coordinator
    withheld: list[WorkerRecord] | None = None  # recipients of the latest view until enough launchers have stored it
    lacks_quorum: bool = False  # whether the job is waiting for members without which it must not continue
    # An earlier coordinator's transfers to receivers that have not reported yet, by receiver.
    transfers: dict[str, StateTransfer] = field(default_factory=dict)
    # The senders' replies, by transfer and sender.
    transfer_offers: dict[int, dict[str, TransferReady]] = field(default_factory=dict)
    must_move: bool = False  # whether the members must change to another store, because theirs is about to close
    identity: str = ""  # distinguishes this job from all others
    quiet_until_s: float = 0.0  # the earliest time for the first view
    _last_text: str = ""

    def notify(self, text: str) -> None:
        """Adds a sentence for the user, unless it repeats the previous one."""
        if text != self._last_text:
            self._last_text = text
            self.orders.append(NotifyOrder(text))

    def send(self, worker: WorkerRecord, message: ToWorker) -> None:
        """Adds a message for a worker, if the worker is reachable."""
        if worker.lives and worker.machine.is_reachable:
            self.orders.append(SendOrder(worker.machine.name, worker.uid, message))

    def dismiss(self, worker: WorkerRecord, reason: str, code: int = 0) -> None:
        """Orders a worker to exit."""
        worker.phase = WorkerPhase.DISMISSED
        self.send(worker, ExitRequest(reason, code))

    def dismiss_needless(self, worker: WorkerRecord) -> bool:
        """Dismisses a worker that was asked to leave, or any worker while the job ends; returns whether it did."""
        is_needless = worker.leaving is not None or self.ending_s is not None
        if is_needless:
            self.dismiss(worker, f"asked to leave: {worker.leaving}" if worker.leaving else "the job has finished")
        return is_needless

    def give(self, members: Sequence[WorkerRecord], *, is_planned: bool) -> None:
        """Issues the next view, and sends it to the members and to the workers that the view excludes."""
        known = self.registry.workers.values() if self.is_shared else ()
        outside = [worker for worker in known if worker.phase is WorkerPhase.OUTSIDE]
        recipients = {worker.uid: worker for worker in [*members, *self.views.concerned, *outside]}
        must_wait = len(members) < self.policy.min_workers and self.ending_s is None
        self.views.give(members, is_planned=is_planned, must_wait=must_wait)
        if not is_planned:
            self.breaks.answered()
        self.withheld = list(recipients.values())
        self.release()

    def release(self) -> None:
        """Sends the latest view if every later coordinator would also hold the view."""
        view, recipients = self.views.latest, self.withheld
        if view is None or recipients is None:
            return
        if self.is_shared and self.ending_s is None and not self.views.is_known():
            return
        self.withheld = None
        for worker in recipients:
            self.send(worker, view)

    def remind(self, worker: WorkerRecord) -> None:
        """Repeats the messages that a worker may have missed."""
        if worker.phase is WorkerPhase.DISMISSED:
            self.send(worker, ExitRequest("the job no longer needs it"))
            return
        base, latest = self.views.base, self.views.latest
        if self.withheld is not None:
            self.withheld.append(worker)
            latest = None
        elif base is not None and base is not latest and worker.uid in base.members:
            self.send(worker, base)
        if latest is not None:
            self.send(worker, latest)
        for transfer in self.open_transfers() if worker in self.views.team else ():
            self.send(worker, transfer)
        for offer in worker.offers:
            self.send(worker, offer)

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
