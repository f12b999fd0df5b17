"""`WorkerPool`: an elastic job's workers on this machine, with their channels and shared resources."""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from paceline.comm.security.secret import SECRET_FD_VARIABLE as SECRET_FD
from paceline.comm.security.secret import SecretFile
from paceline.comm.store.tcp_store import StoreServer, listen
from paceline.linux import process_fields
from paceline.operate.launch.elastic.worker_replacement import WorkerHistory
from paceline.operate.launch.job import Job
from paceline.operate.launch.job_directory import JobRecordings
from paceline.operate.launch.multinode.node_connection import NodeConnection
from paceline.operate.launch.multinode.protocol import Start, StartSlots
from paceline.operate.launch.workers.cleanup import Cleanup
from paceline.operate.launch.workers.environment import free_port
from paceline.operate.launch.workers.forker import Forker
from paceline.operate.launch.workers.job_control import Keyboard
from paceline.operate.launch.workers.output import Logs
from paceline.operate.launch.workers.start_workers import MachineResources, WorkerContext, modules_to_fork, prepare
from paceline.operate.launch.workers.worker import OutputForwarder, WorkerProcess, allow_descriptors
from paceline.operate.launch.workers.worker_group import WorkerSpec
from paceline.train.elastic import protocol
from paceline.train.elastic.protocol import LARGEST_DATAGRAM, FromWorker


class WorkerChannel:
    """The launcher's end of a socket pair to one worker. Each datagram contains one message.

    A worker that stops reading does not block the launcher, because datagrams are queued until the worker reads them.
    """

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, on_datagram: Callable[[bytes], None]
    ) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._selector = selector
        self._on_datagram = on_datagram
        self._unsent: deque[bytes] = deque()
        self._is_open = True
        selector.register(connection, selectors.EVENT_READ, self._on_ready)

    def send(self, datagram: bytes) -> None:
        """Sends a datagram, or queues it until the worker reads. Drops the datagram if the worker has exited."""
        self._unsent.append(datagram)
        self._flush()

    def drain(self) -> None:
        """Handles all datagrams received from the worker so far."""
        while self._is_open:
            try:
                datagram = self._connection.recv(LARGEST_DATAGRAM)
            except BlockingIOError:
                return
            except OSError:
                datagram = b""
            if not datagram:
                self.close()
                return
            self._on_datagram(datagram)

    def close(self) -> None:
        """Closes the channel. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._connection)
            self._connection.close()

    def _on_ready(self) -> None:
        self._flush()
        self.drain()

    def _flush(self) -> None:
        while self._is_open and self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError:  # the worker has exited; the launcher detects this elsewhere
                self._unsent.clear()
                break
            self._unsent.popleft()
        if self._is_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            self._selector.modify(self._connection, events, self._on_ready)


STOPPED_AFTER_S = 1.0  # a worker that is stopped for this long counts as frozen; a merely slow worker never does


@dataclass
class StoppedProcesses:
    """Processes stopped by a signal, with the time at which each was first seen to be stopped."""

    since_s: dict[int, float] = field(default_factory=dict)
    _looked_s: float = 0.0

    def look(self, stopped: Iterable[int], now_s: float) -> None:
        """Updates the set of stopped processes."""
        self.since_s = {pid: self.since_s.get(pid, now_s) for pid in stopped}
        self._looked_s = now_s

    def frozen(self, now_s: float) -> list[int]:
        """Returns the ids of processes that have been stopped for too long."""
        return [pid for pid, since_s in self.since_s.items() if now_s - since_s >= STOPPED_AFTER_S]

    @property
    def deadline_s(self) -> float | None:
        """The time of the next check, or None while no process is stopped."""
        known_s = [
            self._looked_s if pid in self.frozen(self._looked_s) else since_s for pid, since_s in self.since_s.items()
        ]
        return min(known_s) + STOPPED_AFTER_S if known_s else None


def is_stopped(pid: int) -> bool:
    """Returns True if a process is stopped by a signal. A process held by a debugger does not count."""
    with contextlib.suppress(OSError, IndexError):
        return process_fields(pid)[0] == "T"
    return False


class WorkerResources:
    """Resources shared by the workers: the secret, the forker, and the store if this launcher serves it.

    With several machines, the launcher that hosts the rendezvous also serves the store. Workers cannot serve the store,
    because any of them may die. `port` is the port of the store that this launcher serves to other machines, or 0.
    """

    def __init__(self, job: Job, connection: NodeConnection, secret: bytes | None, cleanup: Cleanup) -> None:
        self._job = job
        self._cleanup = cleanup
        self.secret = None if secret is None else hmac.digest(secret, b"workers of an elastic job", "sha256")
        self._opened = contextlib.ExitStack()
        self.port = 0
        if connection.server is not None:
            store = StoreServer(listen(connection.address, 0, self.secret), self.secret)
            self._opened.callback(store.close)
            self.port = store.port

    def open(
        self,
        begin: StartSlots,
        environment: dict[str, str],
        machine: MachineResources,
        logs: Logs,
        keyboard: Keyboard,
        recordings: JobRecordings,
    ) -> WorkerContext:
        """Creates the resources, adds variables to `environment`, and returns the workers' common context.

        Raises an OSError if the store cannot be served.
        """
        served = begin.store
        if not served:
            path = Path(self._cleanup.directory, "store-1")
            self._opened.callback(StoreServer.on_unix_path(str(path), self.secret).close)
            served = f"unix:{path}"
        environment["PACELINE_STORE"] = served
        # Lets torch request huge pages, which make the forks for state transfers five times as fast.
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        pass_fds = []
        if self.secret is not None:
            file = SecretFile.create(self.secret)
            self._opened.callback(os.close, file.fd)
            environment[SECRET_FD] = str(file)
            pass_fds = [file.fd]
        return WorkerContext(
            environment,
            pass_fds=pass_fds,
            directory=self._cleanup.directory,
            cores=machine.cores,
            gpus=machine.gpus,
            logs=logs,
            keyboard=keyboard,
            recordings=recordings,
        )

    def start_of(self, begin: StartSlots) -> Start:
        """Returns a `Start` whose ranks are the slot numbers."""
        host, port = "127.0.0.1", self._job.port or free_port()
        if begin.store:
            address, _, number = begin.store.removeprefix("tcp:").rpartition(":")
            host, port = address.strip("[]"), int(number)
        most = self._job.max_restarts
        first, slots = begin.first_slot, begin.slots
        return Start(1, 0, most, begin.run_id, begin.machine, begin.machine + 1, first, slots, first, slots, host, port)

    def forker(
        self, context: WorkerContext, selector: selectors.BaseSelector, print_line: Callable[[str], None]
    ) -> Forker:
        """Returns the forker. It forks workers unless the user's options or the program require new interpreters."""
        descriptors = allow_descriptors(self._job.workers)
        modules = modules_to_fork(self._job)
        preload = self._job.elastic.preload if self._job.elastic is not None else ()
        forker = Forker(context.environment, context.pass_fds, descriptors, selector, print_line, modules, preload)
        self._opened.callback(forker.close)
        return forker

    def close(self) -> None:
        """Releases all resources. Idempotent."""
        self._opened.close()


NAME = "PACELINE_WORKER"


@dataclass
class PoolWorker:
    """The worker in a slot: its name, its process (once started), and its history."""

    uid: str
    slot: int  # slot number on this machine, starting at 0
    number: int  # slot number in the job, which is the worker's RANK
    channel: WorkerChannel
    requested_s: float
    is_replacement: bool = False  # whether the slot had an earlier worker
    life: WorkerHistory = field(default_factory=WorkerHistory)
    worker: WorkerProcess | None = None
    following: OutputForwarder | None = None

    def __str__(self) -> str:
        pid = f", pid {self.worker.pid}" if self.worker is not None else ""
        return f"slot {self.number} (worker {self.uid}{pid})"

    @property
    def runs(self) -> bool:
        """Whether the worker's process has been started and, as far as is known, has not exited."""
        return self.worker is not None and self.worker.exit_code is None

    def signal(self, number: int) -> None:
        """Sends a signal to the worker if it is running."""
        if self.worker is not None and self.worker.exit_code is None:
            self.worker.signal(number)


class WorkerPool:
    """Starts workers and monitors them until they exit.

    Args:
        machine: The number of this machine, used as a prefix of worker names.
        marks: A function that takes a worker's name and returns the environment variables that mark all of the worker's
            processes.
        on_start: A function called with each worker whose process has started.
        on_message: A function called with each message from a worker, or with None for an invalid datagram.
        on_end: A function called with each worker that has exited, once all of its messages and output are handled.
    """

    def __init__(
        self,
        job: Job,
        start: Start,
        machine: int,
        context: WorkerContext,
        forker: Forker,
        selector: selectors.BaseSelector,
        *,
        marks: Callable[[str], dict[str, str]],
        on_start: Callable[[PoolWorker], None],
        on_message: Callable[[PoolWorker, FromWorker | None, bytes], None],
        on_end: Callable[[PoolWorker, int], None],
    ) -> None:
        self.members: dict[int, PoolWorker] = {}
        self.stopped = StoppedProcesses()
        self._job, self._start, self._machine, self._context = job, start, machine, context
        self._forker = forker
        self._selector = selector
        self._marks = marks
        self._on_start, self._on_message, self._on_end = on_start, on_message, on_end
        self._attempts: dict[int, int] = {}

    def add(self, slot: int) -> None:
        """Starts a worker in an empty slot. `on_start` is called once the process has started.

        Raises an OSError if the limit on descriptors or processes is reached.
        """
        attempt = self._attempts.get(slot, 0)
        self._attempts[slot] = attempt + 1
        number = self._start.first_rank + slot
        uid = f"{self._machine}.{number}.{attempt}"
        start = msgspec.structs.replace(self._start, generation=attempt + 1, restart_count=attempt)
        prepared = prepare(self._job, start, slot, self._context)
        prepared.variables.update({NAME: uid, **self._marks(uid)})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = WorkerChannel(ours, self._selector, lambda datagram: self._receive(member, datagram))
        member = PoolWorker(uid, slot, number, channel, time.monotonic(), is_replacement=attempt > 0)
        self.members[slot] = member
        try:
            self._forker.start(prepared.request(partial(self._started, member, prepared), theirs))
        except OSError:
            prepared.close()
            self._forget(member)
            raise

    def by_uid(self, uid: str) -> PoolWorker | None:
        """Returns the worker with this name if it is running or starting, otherwise None."""
        return next((member for member in self.members.values() if member.uid == uid), None)

    def pids(self) -> list[int]:
        """Returns the process ids of workers that are not known to have exited."""
        self._forker.read()  # updates the pids of workers that have just been forked
        return [worker.pid for worker in self._running()]

    def interactive(self) -> WorkerProcess | None:
        """Returns the worker that is waiting for typed input (in `paceline.breakpoint` or a terminal read), or None."""
        running = self._running()
        debugged = [worker for worker in running if os.path.exists(worker.debugger_file)]
        reading = [worker for worker in running if worker.reads and self._context.keyboard.is_read_by(worker.pid)]
        return next(iter([*debugged, *reading]), None)

    def signal(self, number: int) -> None:
        """Sends a signal to every running worker."""
        for member in self.members.values():
            member.signal(number)

    def end(self, number: int) -> None:
        """Sends a terminating signal to all workers, including stopped ones, and starts no new workers."""
        self._forker.cancel()
        for member in [worker for worker in self.members.values() if worker.worker is None]:
            self._forget(member)
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped worker handles the terminating signal before its program continues

    def kill(self) -> None:
        """Kills all workers immediately."""
        self.end(signal.SIGKILL)

    def resize(self) -> None:
        """Forwards the terminal's current size to the workers that write to it."""
        for member in self.members.values():
            if member.following is not None:
                member.following.resize()

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `tick` must be called, or None."""
        followings = [member.following for member in self.members.values() if member.following is not None]
        times_s = [
            self.stopped.deadline_s,
            self._forker.deadline_s,
            *(following.deadline_s for following in followings),
        ]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Carries out the work that is due."""
        self._forker.tick(now_s)
        for member in self.members.values():
            if member.following is not None:
                member.following.tick(now_s)
        if (deadline_s := self.stopped.deadline_s) is not None and now_s >= deadline_s:
            self.look_for_stopped(now_s)

    def frozen(self, now_s: float) -> list[PoolWorker]:
        """Returns workers that have been stopped for too long."""
        frozen = self.stopped.frozen(now_s)
        return [member for member in self.members.values() if member.worker is not None and member.worker.pid in frozen]

    def look_for_stopped(self, now_s: float) -> None:
        """Updates the set of stopped workers."""
        self.stopped.look([pid for pid in self.pids() if is_stopped(pid)], now_s)

    def close(self) -> None:
        """Kills the remaining workers and closes every channel and pipe. Idempotent."""
        for member in list(self.members.values()):
            if member.worker is not None:
                member.worker.signal(signal.SIGKILL)
                if member.worker.exit_code is None:
                    self._selector.unregister(member.worker.pidfd)
                    member.worker.collect()
            self._forget(member)
        self._context.keyboard.restore()

    def _running(self) -> list[WorkerProcess]:
        return [member.worker for member in self.members.values() if member.worker is not None and member.runs]

    def _started(self, member: PoolWorker, prepared: WorkerSpec, pid: int) -> None:
        try:
            worker = prepared.started(pid)
        except ProcessLookupError:  # the process has already exited
            prepared.close()
            self._forget(member)
            self._on_end(member, -signal.SIGKILL)
            return
        member.worker = worker
        member.following = OutputForwarder(worker, prepared.outputs, self._selector)
        if self.members.get(member.slot) is not member:  # the job ended in the meantime
            worker.signal(signal.SIGKILL)
            worker.collect()
            self._forget(member)
            return

        def ended() -> None:
            self._selector.unregister(worker.pidfd)
            self._ended(member, worker)

        self._selector.register(worker.pidfd, selectors.EVENT_READ, ended)
        self._on_start(member)

    def _ended(self, member: PoolWorker, worker: WorkerProcess) -> None:
        code = worker.collect()
        member.channel.drain()
        if member.following is not None:
            member.following.drain()
        self._forget(member)
        if worker.reads:
            self._context.keyboard.restore()
        self._on_end(member, code)

    def _receive(self, member: PoolWorker, datagram: bytes) -> None:
        try:
            message = protocol.decode_from_worker(datagram)
        except ValueError:
            self._on_message(member, None, datagram)
        else:
            self._on_message(member, message, datagram)

    def _forget(self, member: PoolWorker) -> None:
        if self.members.get(member.slot) is member:
            del self.members[member.slot]
        member.channel.close()
        if member.following is not None:
            member.following.close()
