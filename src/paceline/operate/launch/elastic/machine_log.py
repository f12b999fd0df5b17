"""What a launcher remembers of an elastic job, for a coordinator that it follows later.

What a machine must be able to repeat about a worker: to a coordinator that lost touch with it, or to a new one.

What a launcher remembers of its workers and of the job, to report it to a coordinator that it follows anew.

The failures that the user of an elastic job is shown at its end, whoever coordinates it then.
"""

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

_TRANSFERS_KEPT = 4  # that a sender may give at a time, and more


@dataclass
class ReplayableMessages:
    """The messages of a worker that still matter, oldest first.

    A machine that meets a coordinator again, or for the first time, reports that it joined; then, for each worker that
    runs, that it started, and each of `messages` as if the worker had said it now; then the deaths that the
    coordinator may not know of. The coordinator answers with the view of today.
    """

    messages: list[FromWorker] = field(default_factory=list)

    def heard(self, message: FromWorker) -> None:
        """Takes the worker's next message."""
        match message:
            case Ready():
                self.messages = [each for each in self.messages if isinstance(each, Leaving)]
            case Installed():
                self._forget(Installed, Broken, CaughtUp)
            case CaughtUp():
                self._forget(CaughtUp)
            case TransferReady():
                given = [each for each in self.messages if isinstance(each, TransferReady)]
                self.messages = [each for each in self.messages if each not in given[: 1 - _TRANSFERS_KEPT]]
            case Broken():
                self._forget(Broken)
            case Leaving():
                self._forget(Leaving)
            case LoopFinished():
                self._forget(LoopFinished, Broken)
        self.messages.append(message)

    def _forget(self, *kinds: type[FromWorker]) -> None:
        self.messages = [each for each in self.messages if not isinstance(each, kinds)]


_REMEMBERED = 256  # workers that have ended


@dataclass
class _RunningWorker:
    standing: ReplayableMessages = field(default_factory=ReplayableMessages)
    stalled: str | None = None


@dataclass
class MachineState:
    """Keeps what a coordinator needs to know of one machine.

    What the coordinator tells the machine is noted here when it comes, before anything is passed on to a worker: so a
    view that some worker may have heard of is known to every coordinator that this launcher follows later.
    """

    host: str
    slots: int
    number: int = -1
    first_slot: int = 0
    knowledge: ReplicatedJobState = field(default_factory=ReplicatedJobState)
    is_leaving: bool = False
    _workers: dict[str, _RunningWorker] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _has_failed: bool = False  # a worker has, after its loop
    _ended: dict[str, tuple[str, int]] = field(default_factory=dict)

    def started(self, uid: str) -> None:
        """A worker runs."""
        self._workers.setdefault(uid, _RunningWorker()).stalled = None

    def said(self, uid: str, message: FromWorker) -> None:
        """A worker has sent a message."""
        if uid in self._workers:
            self._workers[uid].standing.heard(message)
            self._workers[uid].stalled = None
            if isinstance(message, LoopFinished):
                self._finished.add(uid)

    def stalled(self, uid: str, why: str) -> None:
        """A worker does nothing."""
        if uid in self._workers:
            self._workers[uid].stalled = why

    def ended(self, uid: str, how: str, code: int) -> None:
        """A worker has ended."""
        self._workers.pop(uid, None)
        self._has_failed |= uid in self._finished and code > 0
        self._ended[uid] = (how, code)
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    @property
    def has_finished(self) -> bool:
        """Whether a worker of this machine has come to the end of the training, and none has failed since."""
        return bool(self._finished) and not self._has_failed

    @property
    def is_done(self) -> bool:
        """Whether this machine's part of the job is over."""
        return self.has_finished and not self._workers

    def learns(self, knowledge: ReplicatedJobState) -> None:
        """The coordinator tells what it knows."""
        self.knowledge = merge_job_states([self.knowledge, knowledge])

    def passes_on(self, view: View) -> None:
        """The coordinator tells a worker a view."""
        self.knowledge = merge_job_states(
            [self.knowledge, ReplicatedJobState(term=view.generation >> 32, views=(view,))]
        )

    def machine_ended(self, number: int) -> None:
        """The launcher of that machine has ended, and all that it ever told this one is known."""
        ended = {*self.knowledge.ended, number}
        self.knowledge = msgspec.structs.replace(self.knowledge, ended=tuple(sorted(ended)))

    def report(self) -> MachineReport:
        """Returns what a coordinator that is followed from now on is told."""
        workers = [
            WorkerReport(uid, tuple(each.standing.messages), each.stalled) for uid, each in self._workers.items()
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


MOST_FAILURES = 64  # that are kept


@dataclass
class ReportedFailures:
    """Failures in the order in which they became known, each once."""

    failures: tuple[WorkerFailure, ...] = ()

    def add(self, failures: Iterable[WorkerFailure]) -> bool:
        """Adds failures; returns whether any is new. Beyond the first few they are too many to tell anybody more."""
        known = {(each.host, each.pid) for each in self.failures}
        new = [each for each in failures if (each.host, each.pid) not in known][: MOST_FAILURES - len(self.failures)]
        self.failures = shortened([*self.failures, *new])
        return bool(new)


@dataclass
class MachineLog:
    """The account of this machine, how it has introduced itself, and the failures that the user is shown at the end.

    Attributes:
        join: what it said when it came.
        leave: what it says when it goes, once it does.
    """

    account: MachineState
    blame: ReportedFailures = field(default_factory=ReportedFailures)
    join: JoinJob | None = None
    leave: Leave | None = None

    def reported(self, report: Report) -> None:
        """Notes what this launcher tells the coordinator."""
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
        """Notes what the coordinator orders; views before any worker hears of them."""
        match order:
            case StartSlots():
                self.account.number, self.account.first_slot = order.machine, order.first_slot
            case SendOrder(message=View() as view):
                self.account.passes_on(view)
            case Remember(failures):
                self.blame.add(failures)

    def follow(self) -> Follow:
        """Returns what a coordinator that is followed from now on is told."""
        return Follow(self.account.report(), self.blame.failures)
