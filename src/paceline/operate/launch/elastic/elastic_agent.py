"""`ElasticAgent`: an elastic job's launcher on one machine, which replaces workers while the other workers continue.

`WorkerExits` determines the causes of workers' exits and reports them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from paceline.operate.diagnosis.stall_detector import WatchedWorker, explain_or_default
from paceline.operate.launch.elastic.chaos_runner import ChaosRunner
from paceline.operate.launch.elastic.elastic_controller import ShutdownPlan
from paceline.operate.launch.elastic.machine_log import ReportedFailures
from paceline.operate.launch.elastic.worker_pool import STOPPED_AFTER_S, PoolWorker, WorkerPool, WorkerResources
from paceline.operate.launch.elastic.worker_replacement import (
    CloseSlot,
    ExitCause,
    ReplaceWorker,
    SlotTable,
    WorkerHistory,
    exit_cause_of,
)
from paceline.operate.launch.failures import (
    WorkerFailure,
    describe_signal,
    read_record,
    shortened,
    signal_name,
    write_error_json,
)
from paceline.operate.launch.job import Job
from paceline.operate.launch.launcher import Launcher, Workers
from paceline.operate.launch.multinode.node_connection import NodeConnection
from paceline.operate.launch.multinode.protocol import (
    JobEnded,
    JobMoved,
    Order,
    Report,
    Slots,
    StartSlots,
    WorkerExited,
    WorkerMessage,
    WorkerStalled,
    WorkerStarted,
)
from paceline.operate.launch.shared_secret import SlurmSecret
from paceline.operate.launch.watchdog import ending_of
from paceline.operate.launch.workers.cleanup import Cleanup
from paceline.operate.launch.workers.environment import free_port
from paceline.operate.launch.workers.worker import MemoryWatch, failure_of
from paceline.operate.launch.workers.worker_group import CONSEQUENCES_S
from paceline.operate.launch.workers.worker_stores import port_beside
from paceline.train.checkpoint.peer_memory.server import VARIABLE as COPIES
from paceline.train.elastic.process_priority import LoweredPriorities
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    ExitRequest,
    FenceStalledOrder,
    FromWorker,
    NotifyOrder,
    SendOrder,
    ToWorker,
    TransferOffer,
    View,
    ViewInstalled,
    WorkerReady,
    encode_message,
)


class ElasticAgent(Launcher):
    """Keeps the slots on this machine filled, and connects their workers to the coordinator."""

    word = "slot"  # not "rank", because a worker's rank changes between views

    def __init__(
        self, job: Job, connection: NodeConnection, secret: bytes | None, shared: SlurmSecret, cleanup: Cleanup
    ) -> None:
        super().__init__(job, connection, secret, shared, cleanup)
        assert job.elastic is not None
        self._options = job.elastic
        self._resources = WorkerResources(job, connection, secret, cleanup)
        self._exits = WorkerExits(job.stall_after_s > 0, self.word, self._print_line)
        self._members: WorkerPool | None = None
        self._slots: SlotTable | None = None
        self._priorities = LoweredPriorities()
        self._chaos: ChaosRunner | None = None
        self._next_signal: tuple[float, int] | None = None  # time (monotonic) and number of the next signal
        self._shutdown = ShutdownPlan(job.rendezvous.address is not None)

    @property
    def _continues(self) -> bool:
        return self._end is None and self._stopped_by is None

    def _running_workers(self) -> WorkerPool | None:
        return self._members

    def _watched(self) -> list[WatchedWorker]:
        members = self._members.members.values() if self._members is not None else []
        return [
            WatchedWorker(member.number, member.worker.pid, member.worker.memory.fd if member.worker.memory else None)
            for member in members
            if member.worker is not None and member.runs
        ]

    def _ports(self) -> tuple[int, int]:
        port = self._resources.port or port_beside(self._job.one_port) or free_port(self._connection.address)
        return port, 0

    def _is_over(self) -> bool:
        return self._end is not None and (self._members is None or not self._members.members)

    def _deadlines(self) -> list[float | None]:
        return [
            self._next_signal[0] if self._next_signal is not None else None,
            self._members.deadline_s if self._members is not None else None,
            self._slots.deadline_s if self._slots is not None else None,
            self._chaos.deadline_s if self._chaos is not None and self._continues else None,
        ]

    def _tick(self, now_s: float) -> None:
        if self._members is None or self._slots is None:
            return
        self._members.tick(now_s)
        self._report_frozen(now_s)
        if self._next_signal is not None and now_s >= self._next_signal[0]:
            self._members.end(self._next_signal[1])
            self._next_signal = (now_s + self._job.shutdown_timeout_s, signal.SIGKILL)
        if self._chaos is not None and self._continues:
            self._chaos.tick(now_s, list(self._members.members.values()))
        for slot in self._slots.due(now_s):
            self._fill(slot, now_s)
        if not self._members.members:
            self._send(self._shutdown.farewell(self._connection.coordinates()))

    def _follow(self, order: Order) -> None:
        match order:
            case StartSlots() if self._members is None and self._stopped_by is None:
                self._begin(order)
            case SendOrder():
                self._send_to_worker(order.uid, order.message)
            case FenceStalledOrder():
                self._fence(order.uid)
            case CloseSlotsOrder(reason=reason):
                self._print_line(reason)
                self._close_slots()
            case NotifyOrder(reason):
                self._events.write("wait", reason=reason)
                self._print_line(reason)
            case JobMoved() if self._end is None:
                self._give_way(order)
            case JobEnded() if self._end is None:
                self._end = order
                self._on_end(order)

    def _begin(self, begin: StartSlots) -> None:
        first, count = begin.first_slot, self._job.workers
        self._events.write("start", generation=1, ranks=list(range(first, first + count)))
        self._dashboard.generation(begin.slots, 0)
        if self._shutdown.is_shared:
            self._print_line(describe_slots(first, count, begin.slots))
        self._directory.note(job=begin.run_id, machine=begin.machine)
        environment = self._environment("0")
        path = os.path.join(self._cleanup.directory, f"copies-{begin.machine}")
        environment[COPIES] = self._copies.open(path, self._resources.secret)
        context = self._resources.open(begin, environment, self._machine, self._logs, self._keyboard, self._recordings)
        self._members = WorkerPool(
            self._job,
            self._resources.start_of(begin),
            begin.machine,
            context,
            self._resources.forker(context, self._selector, self._print_line),
            self._selector,
            marks=self._cleanup.variables,
            on_start=self._on_start,
            on_message=self._on_message,
            on_end=self._on_member_end,
        )
        self._slots = SlotTable(count, time.monotonic(), self._options.most_replacements)
        if self._options.chaos is not None:
            spared = 0 if self._shutdown.is_shared else 1
            self._chaos = ChaosRunner(self._options.chaos, begin.machine, spared, self._print_line)
        self._tick(time.monotonic())

    def _fill(self, slot: int, now_s: float) -> None:
        assert self._members is not None and self._slots is not None
        try:
            self._members.add(slot)
        except OSError as error:
            decision = self._slots.ended(slot, ExitCause.FAILED, WorkerHistory(), now_s)
            self._print_line(f"no worker can be started in slot {slot} ({error}); {describe_decision(decision)}")
            if isinstance(decision, CloseSlot):
                self._connection.client.send(Slots(self._slots.count))

    def _on_children(self, workers: Workers | None) -> None:
        super()._on_children(workers)
        if self._members is not None:
            now_s = time.monotonic()
            self._members.look_for_stopped(now_s)
            self._report_frozen(now_s)

    def _on_start(self, member: PoolWorker) -> None:
        assert member.worker is not None
        self._cleanup.watch(member.worker.pid)
        self._exits.began(member)
        if member.is_replacement:
            self._priorities.begin(member.worker.pid)
        self._events.write("worker", uid=member.uid, slot=member.slot, pid=member.worker.pid)
        self._connection.client.send(WorkerStarted(member.uid))

    def _on_message(self, member: PoolWorker, message: FromWorker | None, datagram: bytes) -> None:
        """Forwards a worker's message to the coordinator; kills a worker that sends invalid data."""
        now_s = time.monotonic()
        match message:
            case None:
                self._print_line(f"{member} is killed because it sent {datagram[:80]!r}, which is not a valid message")
                member.signal(signal.SIGKILL)
                return
            case WorkerReady():
                self._events.write("ready", uid=member.uid, after_ms=round(1000 * (now_s - member.requested_s)))
            case ViewInstalled(generation):
                self._shutdown.took_part = True
                self._events.write("installed", uid=member.uid, view=generation)
                if self._chaos is not None:
                    self._chaos.entered(member, member.life.took_part_s is None, now_s)
        member.life.receive(message, now_s)
        self._connection.client.send(WorkerMessage(member.uid, message))

    def _worker(self, uid: str) -> PoolWorker | None:
        return self._members.by_uid(uid) if self._members is not None else None

    def _send_to_worker(self, uid: str, message: ToWorker) -> None:
        if (member := self._worker(uid)) is None:
            return
        if isinstance(message, ExitRequest):
            member.life.dismissed = message.code
            if message.code:
                self._print_line(f"{member} is dismissed: {message.reason}")
        if isinstance(message, (TransferOffer, View)) and member.worker is not None:
            self._priorities.end(member.worker.pid)
        member.channel.send(encode_message(message))

    def _on_member_end(self, member: PoolWorker, code: int) -> None:
        assert self._members is not None and self._slots is not None
        how = f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
        if member.worker is not None:
            is_failure = exit_cause_of(member.life, code, False, False) in (ExitCause.KILLED, ExitCause.FAILED)
            self._dashboard.worker_ended(member.number, member.worker.pid, how if is_failure else "")
        self._connection.client.send(WorkerExited(member.uid, how, code))
        self._on_orders()  # send pending orders to other machines before any slow work below
        now_s = time.monotonic()
        failure = self._exits.failure_of(member, code)
        record = failure.record if failure is not None else None
        is_exception = failure is not None and record is not None and not failure.is_interrupt
        fate = exit_cause_of(member.life, code, is_exception, failure is not None and failure.memory is not None)
        decision = self._slots.ended(member.slot, fate, member.life, now_s)
        if self._chaos is not None and isinstance(decision, ReplaceWorker):
            self._chaos.lost(member, list(self._members.members.values()), now_s)
        if self._stopped_by is None and self.moved is None:
            self._exits.report(member, code, fate, failure, decision, self._end is not None)
            if isinstance(decision, CloseSlot) and record is not None and self._slots.count:
                self._print_line(f"the last traceback of slot {member.number}:\n{record.text.rstrip()}")
        self._exits.forget(member)
        if isinstance(decision, CloseSlot) and self._continues:
            kept = shortened(self._exits.failures) if fate is not ExitCause.LEFT else ()
            self._connection.client.send(Slots(self._slots.count, kept))
        self._events.write("ended", uid=member.uid, how=how)
        if member.worker is not None:
            self._priorities.forget(member.worker.pid)
            self._cleanup.end_worker(member.uid, member.worker.pid, self._members.pids())

    def _report_frozen(self, now_s: float) -> None:
        """Reports stopped and resumed workers to the coordinator, which decides which workers are needed."""
        assert self._members is not None
        frozen = self._members.frozen(now_s)
        for member in list(self._members.members.values()):
            if (member in frozen) == member.life.is_stalled:
                continue
            member.life.is_stalled = not member.life.is_stalled
            if member.life.is_stalled:
                self._connection.client.send(
                    WorkerStalled(member.uid, f"stopped by a signal for {STOPPED_AFTER_S:g} s")
                )
            elif member.runs:
                self._connection.client.send(WorkerStarted(member.uid))

    def _fence(self, uid: str) -> None:
        """Kills a stopped worker, because a resumed worker would interfere with the workers that continued."""
        member = self._worker(uid)
        if member is not None and member.life.is_stalled:
            member.life.is_fenced = True
            member.signal(signal.SIGKILL)

    def _close_slots(self) -> None:
        if self._slots is not None and self._members is not None:
            self._slots.close(set(self._members.members))

    def _on_end(self, end: JobEnded) -> None:
        """Ends the workers with incomplete training loops, and schedules SIGTERM for workers that are still running."""
        self._close_slots()
        if self._members is None:
            return
        farewell = encode_message(ExitRequest(end.reason or "the job has ended", end.code))
        for member in self._members.members.values():
            if not member.life.has_finished:
                member.life.dismissed = 0  # a dismissed worker's exit code is not a failure
                member.channel.send(farewell)
                if member.life.took_part_s is None:
                    member.signal(signal.SIGKILL)
        patience_s = CONSEQUENCES_S if end.code else self._job.shutdown_timeout_s
        self._next_signal = (time.monotonic() + patience_s, signal.SIGTERM)

    def _give_way(self, moved: JobMoved) -> None:
        """Kills all workers before this machine joins a different job."""
        self._end = JobEnded(0)
        if self._stopped_by is None:
            self._print_line(
                f"the job is already running: the launcher at {moved.address} coordinates it; this machine joins it"
            )
            self.moved = moved
        self._close_slots()
        if self._members is not None:
            self._members.kill()

    def _on_end_signal(self, number: signal.Signals, workers: Workers | None) -> None:
        self._shutdown.insists = self._stopped_by is not None
        super()._on_end_signal(number, workers)

    def _stop(self, number: signal.Signals) -> None:
        self._stopped_by = self._shutdown.number = number
        self._watcher.pause()
        self._close_slots()
        if self._members is None:
            self._send(self._shutdown.farewell(coordinates=False))
            return
        self._send([Slots(0), *self._shutdown.announced()])
        self._print_line(describe_signal(number.name, len(self._members.pids()), self._job.shutdown_timeout_s))
        if self._shutdown.hands_over(self._connection.coordinates()):
            self._print_line(
                "this launcher coordinates the job; when its workers have exited, another launcher takes over "
                "(send it again to end the job)"
            )
        self._next_signal = (time.monotonic(), number)

    def _send(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._connection.client.send(report)

    def _close_workers(self) -> None:
        if self._members is not None:
            self._members.close()
            self._cleanup.end_generation("0")
        self._exits.close()
        self._copies.shut()
        self._resources.close()

    def _conclude(self, end: JobEnded) -> int:
        if self.moved is not None:
            return end.code
        if self._chaos is not None:
            for line in self._chaos.summary(time.monotonic()):
                self._print_line(line)
        if end.code:  # the latest failures may not have reached the coordinator before the job ended
            blame = ReportedFailures(end.failures)
            blame.add(self._exits.failures)
            end = msgspec.structs.replace(end, failures=blame.failures)
        if self._shutdown.is_well(end.code):
            if end.reason:
                self._print_line(end.reason)
            return 0
        return super()._conclude(end)


def describe_exit(life: WorkerHistory, failure: WorkerFailure | None) -> str:
    """Describes a worker's exit in a few words, including its exception or kernel statistics if available."""
    if life.is_fenced:
        return "was stopped by a signal, so it was killed"
    if failure is None:
        return "has ended"
    if failure.record is not None:
        return f"failed: {failure.summary}"
    return f"failed: {failure.how}" if failure.memory is None else f"failed: {failure.how}: {failure.memory}"


def describe_decision(decision: ReplaceWorker | CloseSlot) -> str:
    """Describes the consequence of a worker's exit."""
    if isinstance(decision, ReplaceWorker):
        return f"another worker replaces it{f' in {decision.after_s:g} s' if decision.after_s else ''}"
    if decision.reason is not None:
        return f"it is not replaced: {decision.reason}"
    return "it was asked to leave, so it is not replaced"


def describe_slots(first: int, count: int, slots: int) -> str:
    """Describes the range of slots on this machine."""
    if count == 1:
        return f"slot {first} of {slots} is on this machine"
    return f"slots {first} to {first + count - 1} of {slots} are on this machine"


class WorkerExits:
    """Tracks and reports the exits of this machine's workers.

    If `reads` is true, it also reads the recordings of workers that have exited.
    """

    def __init__(self, reads: bool, word: str, print_line: Callable[[str], None]) -> None:
        self.failures: list[WorkerFailure] = []
        self._reads, self._word, self._print_line = reads, word, print_line
        self._memory = MemoryWatch()
        self._recordings: dict[str, int] = {}  # descriptors for recordings, by worker

    def began(self, member: PoolWorker) -> None:
        """Opens a running worker's recording and keeps it open after the worker exits."""
        if self._reads and member.worker is not None and member.worker.memory is not None:
            with contextlib.suppress(OSError):  # no free descriptor
                self._recordings[member.uid] = os.dup(member.worker.memory.fd)

    def failure_of(self, member: PoolWorker, code: int) -> WorkerFailure | None:
        """Returns the failure of a worker that exited with `code`, or None if the worker did not fail."""
        if code == 0 or member.worker is None:
            return None
        output = b"" if member.following is None else member.following.tail
        failure = failure_of(member.worker, code, read_record(member.worker.error_file), self._memory, output)
        write_error_json(failure)
        return failure

    def report(
        self,
        member: PoolWorker,
        code: int,
        fate: ExitCause,
        failure: WorkerFailure | None,
        decision: ReplaceWorker | CloseSlot,
        is_over: bool,
    ) -> None:
        """Reports a worker's exit and its consequence. `is_over` means that the job is ending."""
        if failure is not None and (fate in (ExitCause.FAILED, ExitCause.REFUSED) or member.life.has_finished):
            self.failures.append(failure)
        is_expected = fate in (ExitCause.LEFT, ExitCause.RELEASED) or member.life.took_part_s is None
        if fate is ExitCause.DONE or (is_over and is_expected):
            return
        follows = "the job is ending" if is_over else describe_decision(decision)
        self._print_line(f"{self._verdict(member, code, fate, failure)}; {follows}")

    def forget(self, member: PoolWorker) -> None:
        """Releases the resources held for a worker that has exited."""
        if (recording := self._recordings.pop(member.uid, None)) is not None:
            os.close(recording)

    def close(self) -> None:
        """Releases the resources held for all workers. Idempotent."""
        while self._recordings:
            os.close(self._recordings.popitem()[1])
        self._memory.close()

    def _verdict(self, member: PoolWorker, code: int, fate: ExitCause, failure: WorkerFailure | None) -> str:
        """Returns a sentence about a worker's exit. Failures are diagnosed as in non-elastic jobs."""
        if fate is ExitCause.RELEASED:
            return f"{member} has ended, because the others continued without it"
        if failure is None or member.life.is_fenced or fate not in (ExitCause.FAILED, ExitCause.KILLED):
            return f"{member} {describe_exit(member.life, failure)}"
        number, recording = member.number, self._recordings.get(member.uid)
        if recording is not None:
            from paceline.operate.diagnosis.diagnosis import diagnose_exit
            from paceline.operate.diagnosis.machine_snapshot import snapshot_ended_workers

            worker = WatchedWorker(number, failure.pid, recording, ending_of(code, failure))
            verdict = explain_or_default(
                lambda: diagnose_exit(snapshot_ended_workers([worker]).ranks[0], self._word), None
            )
            name = f"{self._word} {number} failed: "
            if verdict is not None and name in verdict.sentence:
                more = f": {failure.memory}" if failure.memory is not None else ""
                return verdict.sentence.replace(name, f"{member} failed: ", 1) + more
        return f"{member} {describe_exit(member.life, failure)}"
