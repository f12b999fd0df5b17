"""The log of one machine: everything that its launcher can repeat to a coordinator that it follows later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.operate.launch.multinode.protocol import (
    Departing,
    Follow,
    JoinJob,
    Leave,
    Order,
    Remember,
    Report,
    Slots,
    StartSlots,
    WorkerExited,
    WorkerMessage,
    WorkerStalled,
    WorkerStarted,
)
from paceline.operate.launch.workers.failures import WorkerFailure, shortened
from paceline.train.elastic.protocol import (
    Broken,
    CaughtUp,
    FromWorker,
    Installed,
    Leaving,
    LoopFinished,
    MachineReport,
    Ready,
    ReplicatedJobState,
    SendOrder,
    TransferReady,
    View,
    WorkerReport,
    merge_job_states,
)

_TRANSFERS_KEPT = 4  # more than a sender serves at a time


@dataclass
class ReplayableMessages:
    """The messages of a worker that still matter, oldest first.

    When a machine starts to follow a coordinator, it reports these for each running worker, and the coordinator handles
    them as if the worker had just sent them. It replies with the current view.
    """

    messages: list[FromWorker] = field(default_factory=list)

    def heard(self, message: FromWorker) -> None:
        """Adds the worker's next message, and removes those that it replaces."""
        match message:
            case Ready():
                self.messages = [entry for entry in self.messages if isinstance(entry, Leaving)]
            case Installed():
                self._forget(Installed, Broken, CaughtUp)
            case CaughtUp():
                self._forget(CaughtUp)
            case TransferReady():
                given = [entry for entry in self.messages if isinstance(entry, TransferReady)]
                self.messages = [entry for entry in self.messages if entry not in given[: 1 - _TRANSFERS_KEPT]]
            case Broken():
                self._forget(Broken)
            case Leaving():
                self._forget(Leaving)
            case LoopFinished():
                self._forget(LoopFinished, Broken)
        self.messages.append(message)

    def _forget(self, *kinds: type[FromWorker]) -> None:
        self.messages = [message for message in self.messages if not isinstance(message, kinds)]


_REMEMBERED = 256  # the limit of remembered workers that have ended


@dataclass
class _RunningWorker:
    standing: ReplayableMessages = field(default_factory=ReplayableMessages)
    stalled: str | None = None


@dataclass
class MachineState:
    """The facts about one machine that a coordinator needs.

    The coordinator's orders are recorded here before anything is forwarded to a worker. Therefore every coordinator
    that this launcher follows later receives each view that a worker may have received.
    """

    host: str
    slots: int
    number: int = -1
    first_slot: int = 0
    knowledge: ReplicatedJobState = field(default_factory=ReplicatedJobState)
    is_leaving: bool = False
    _workers: dict[str, _RunningWorker] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _has_failed: bool = False  # whether a worker has failed after its loop
    _ended: dict[str, tuple[str, int]] = field(default_factory=dict)

    def started(self, uid: str) -> None:
        """Notes that a worker runs."""
        self._workers.setdefault(uid, _RunningWorker()).stalled = None

    def said(self, uid: str, message: FromWorker) -> None:
        """Notes a worker's message."""
        if uid in self._workers:
            self._workers[uid].standing.heard(message)
            self._workers[uid].stalled = None
            if isinstance(message, LoopFinished):
                self._finished.add(uid)

    def stalled(self, uid: str, why: str) -> None:
        """Notes that a worker is stopped."""
        if uid in self._workers:
            self._workers[uid].stalled = why

    def ended(self, uid: str, how: str, code: int) -> None:
        """Notes that a worker has ended."""
        self._workers.pop(uid, None)
        self._has_failed |= uid in self._finished and code > 0
        self._ended[uid] = (how, code)
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    @property
    def has_finished(self) -> bool:
        """Whether a worker of this machine has completed the training, and none has failed since."""
        return bool(self._finished) and not self._has_failed

    @property
    def is_done(self) -> bool:
        """Whether this machine's part of the job is complete."""
        return self.has_finished and not self._workers

    def learns(self, knowledge: ReplicatedJobState) -> None:
        """Merges the state that the coordinator replicates."""
        self.knowledge = merge_job_states([self.knowledge, knowledge])

    def passes_on(self, view: View) -> None:
        """Notes a view that is forwarded to a worker."""
        self.knowledge = merge_job_states(
            [self.knowledge, ReplicatedJobState(term=view.generation >> 32, views=(view,))]
        )

    def machine_ended(self, number: int) -> None:
        """Notes that the launcher of that machine has ended, and all its messages to this one have been read."""
        ended = {*self.knowledge.ended, number}
        self.knowledge = msgspec.structs.replace(self.knowledge, ended=tuple(sorted(ended)))

    def report(self) -> MachineReport:
        """Returns the report to a coordinator that is followed from now on."""
        workers = [
            WorkerReport(uid, tuple(worker.standing.messages), worker.stalled) for uid, worker in self._workers.items()
        ]
        ended = tuple((uid, how, code) for uid, (how, code) in self._ended.items())
        return MachineReport(
            self.number,
            self.host,
            self.slots,
            self.first_slot,
            self.knowledge,
            tuple(workers),
            ended,
            self.is_leaving,
        )


MOST_FAILURES = 64


@dataclass
class ReportedFailures:
    """The failures that are reported to the user at the end of the job, each once, in order of arrival."""

    failures: tuple[WorkerFailure, ...] = ()

    def add(self, failures: Iterable[WorkerFailure]) -> bool:
        """Adds failures up to a limit; returns whether any is new."""
        known = {(failure.host, failure.pid) for failure in self.failures}
        new = [failure for failure in failures if (failure.host, failure.pid) not in known][
            : MOST_FAILURES - len(self.failures)
        ]
        self.failures = shortened([*self.failures, *new])
        return bool(new)


@dataclass
class MachineLog:
    """The state of this machine, its introduction, and the failures for the final report.

    Attributes:
        account: The machine's state.
        blame: The failures.
        join: The report with which the machine joined, or None.
        leave: The report with which the machine leaves, or None.
    """

    account: MachineState
    blame: ReportedFailures = field(default_factory=ReportedFailures)
    join: JoinJob | None = None
    leave: Leave | None = None

    def reported(self, report: Report) -> None:
        """Notes a report of this launcher to the coordinator."""
        account = self.account
        match report:
            case JoinJob():
                self.join = report
            case WorkerStarted(uid):
                account.started(uid)
            case WorkerMessage(uid, message):
                account.said(uid, message)
            case WorkerStalled(uid, why):
                account.stalled(uid, why)
            case WorkerExited(uid, how, exit_code):
                account.ended(uid, how, exit_code)
            case Slots(count, failures):
                account.slots = count
                self.blame.add(failures)
            case Departing():
                account.is_leaving = True
            case Leave():
                self.leave = report

    def ordered(self, order: Order) -> None:
        """Notes an order of the coordinator. Views are noted before any worker receives them."""
        match order:
            case StartSlots():
                self.account.number, self.account.first_slot = order.machine, order.first_slot
            case SendOrder(message=View() as view):
                self.account.passes_on(view)
            case Remember(failures):
                self.blame.add(failures)

    def follow(self) -> Follow:
        """Returns the report to a coordinator that is followed from now on."""
        return Follow(self.account.report(), self.blame.failures)
