"""Log of one machine: data that the machine's launcher reports again whenever it starts to follow a new coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.operate.launch.failures import WorkerFailure, shortened
from paceline.operate.launch.multinode.protocol import (
    ExitNotice,
    Follow,
    JoinJob,
    NodeStopped,
    Order,
    RecordFailures,
    Report,
    Slots,
    StartSlots,
    WorkerExited,
    WorkerMessage,
    WorkerStalled,
    WorkerStarted,
)
from paceline.train.elastic.protocol import (
    CaughtUp,
    FromWorker,
    LeaveNotice,
    LoopFinished,
    MachineReport,
    ReplicatedJobState,
    SendOrder,
    TransferReady,
    View,
    ViewFailed,
    ViewInstalled,
    WorkerReady,
    WorkerReport,
    merge_job_states,
)

_TRANSFERS_KEPT = 4  # number of transfers to keep; a sender serves fewer at a time
_SUPERSEDED: dict[type[FromWorker], tuple[type[FromWorker], ...]] = {  # earlier messages, by the later one
    ViewInstalled: (ViewInstalled, ViewFailed, CaughtUp),
    CaughtUp: (CaughtUp,),
    ViewFailed: (ViewFailed,),
    LeaveNotice: (LeaveNotice,),
    LoopFinished: (LoopFinished, ViewFailed),
}


@dataclass
class ReplayableMessages:
    """A worker's messages that are still relevant, oldest first.

    When a machine starts to follow a coordinator, it sends these messages for each running worker. The coordinator
    handles them as if the worker had just sent them, and responds with the current view.
    """

    messages: list[FromWorker] = field(default_factory=list)

    def receive(self, message: FromWorker) -> None:
        """Adds the worker's next message, and removes earlier messages that it supersedes."""
        if isinstance(message, WorkerReady):
            self.messages = [entry for entry in self.messages if isinstance(entry, LeaveNotice)]
        elif isinstance(message, TransferReady):
            given = [entry for entry in self.messages if isinstance(entry, TransferReady)]
            self.messages = [entry for entry in self.messages if entry not in given[: 1 - _TRANSFERS_KEPT]]
        superseded = _SUPERSEDED.get(type(message), ())
        self.messages = [*(entry for entry in self.messages if not isinstance(entry, superseded)), message]


_REMEMBERED = 256  # maximum number of exited workers to remember


@dataclass
class _RunningWorker:
    standing: ReplayableMessages = field(default_factory=ReplayableMessages)
    stalled: str | None = None


@dataclass
class MachineState:
    """The state of one machine, from which a new coordinator restores the state of the job.

    Orders from the coordinator are recorded here before anything is forwarded to a worker. Any later coordinator
    therefore receives every view that a worker may have received.
    """

    host: str
    slots: int
    number: int = -1
    first_slot: int = 0
    job_state: ReplicatedJobState = field(default_factory=ReplicatedJobState)
    is_leaving: bool = False
    _workers: dict[str, _RunningWorker] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _has_failed: bool = False  # whether a worker has failed after completing its loop
    _ended: dict[str, tuple[str, int]] = field(default_factory=dict)

    def started(self, uid: str) -> None:
        """Records that a worker is running."""
        self._workers.setdefault(uid, _RunningWorker()).stalled = None

    def record_message(self, uid: str, message: FromWorker) -> None:
        """Records a message from a worker."""
        if uid in self._workers:
            self._workers[uid].standing.receive(message)
            self._workers[uid].stalled = None
            if isinstance(message, LoopFinished):
                self._finished.add(uid)

    def stalled(self, uid: str, why: str) -> None:
        """Records that a worker is stopped."""
        if uid in self._workers:
            self._workers[uid].stalled = why

    def ended(self, uid: str, how: str, code: int) -> None:
        """Records that a worker has exited."""
        self._workers.pop(uid, None)
        self._has_failed |= uid in self._finished and code > 0
        self._ended[uid] = (how, code)
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    @property
    def has_finished(self) -> bool:
        """Whether a worker on this machine has completed its training loop, and no worker has failed since."""
        return bool(self._finished) and not self._has_failed

    @property
    def is_done(self) -> bool:
        """Whether this machine's part of the job is complete."""
        return self.has_finished and not self._workers

    def merge(self, job_state: ReplicatedJobState) -> None:
        """Merges replicated state from the coordinator."""
        self.job_state = merge_job_states([self.job_state, job_state])

    def passes_on(self, view: View) -> None:
        """Records a view that is about to be forwarded to a worker."""
        self.job_state = merge_job_states(
            [self.job_state, ReplicatedJobState(term=view.generation >> 32, views=(view,))]
        )

    def machine_ended(self, number: int) -> None:
        """Records that a machine's launcher has exited and that all of its messages have been read."""
        ended = {*self.job_state.ended, number}
        self.job_state = msgspec.structs.replace(self.job_state, ended=tuple(sorted(ended)))

    def report(self) -> MachineReport:
        """Returns the report to a newly followed coordinator."""
        workers = [
            WorkerReport(uid, tuple(worker.standing.messages), worker.stalled) for uid, worker in self._workers.items()
        ]
        ended = tuple((uid, how, code) for uid, (how, code) in self._ended.items())
        return MachineReport(
            self.number,
            self.host,
            self.slots,
            self.first_slot,
            self.job_state,
            tuple(workers),
            ended,
            tuple(sorted(self._finished)),
            self.is_leaving,
        )


MOST_FAILURES = 64


@dataclass
class ReportedFailures:
    """The failures to report to the user at the end of the job, without duplicates, in order of arrival."""

    failures: tuple[WorkerFailure, ...] = ()

    def add(self, failures: Iterable[WorkerFailure]) -> bool:
        """Adds failures up to a limit; returns whether any of them is new."""
        known = {(failure.host, failure.pid) for failure in self.failures}
        new = [failure for failure in failures if (failure.host, failure.pid) not in known][
            : MOST_FAILURES - len(self.failures)
        ]
        self.failures = shortened([*self.failures, *new])
        return bool(new)


@dataclass
class MachineLog:
    """This machine's state and its `JoinJob`, with the failures for the final report."""

    account: MachineState
    blame: ReportedFailures = field(default_factory=ReportedFailures)
    join: JoinJob | None = None  # the report with which the machine joined
    leave: NodeStopped | None = None  # the report with which the machine leaves

    def reported(self, report: Report) -> None:
        """Records a report from this launcher to the coordinator."""
        account = self.account
        match report:
            case JoinJob():
                self.join = report
            case WorkerStarted(uid):
                account.started(uid)
            case WorkerMessage(uid, message):
                account.record_message(uid, message)
            case WorkerStalled(uid, why):
                account.stalled(uid, why)
            case WorkerExited(uid, how, exit_code):
                account.ended(uid, how, exit_code)
            case Slots(count, failures):
                account.slots = count
                self.blame.add(failures)
            case ExitNotice():
                account.is_leaving = True
            case NodeStopped():
                self.leave = report

    def ordered(self, order: Order) -> None:
        """Records an order from the coordinator. Views are recorded before any worker receives them."""
        match order:
            case StartSlots():
                self.account.number, self.account.first_slot = order.machine, order.first_slot
            case SendOrder(message=View() as view):
                self.account.passes_on(view)
            case RecordFailures(failures):
                self.blame.add(failures)

    def follow(self) -> Follow:
        """Returns the report to a newly followed coordinator."""
        return Follow(self.account.report(), self.blame.failures)
