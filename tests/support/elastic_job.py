"""Runs elastic jobs for tests. Workers are forked from a process that has imported torch, so they start quickly.

The job runs on one machine, with the real coordinator. It replaces each worker that dies, but does not handle signals
or output.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from forking import begin, context, start_server

import paceline as dist
from paceline.comm.store.tcp_store import StoreServer
from paceline.train.elastic import protocol
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.protocol import CoordinatorOrder, EndOrder, NotifyOrder, SendOrder, StartOrder

MACHINE = "0"
_MOST_ATTEMPTS = 5


@dataclass
class Worker:
    """A worker, its socket and the connection that returns its result."""

    uid: str
    slot: int
    process: BaseProcess
    pidfd: int  # the process's sentinel is a pipe, which its child processes may keep open
    socket: socket.socket
    result: Connection


@dataclass
class Outcome:
    """A job's exit code, the workers' results, errors and exit codes, and the printed and received messages."""

    code: int
    results: dict[str, object]
    errors: dict[str, str]
    said: list[str]
    ended: dict[str, int]
    heard: list[tuple[float, str, object]] = field(default_factory=list)


def run(
    program: Callable[..., object],
    *arguments: object,
    workers: int = 3,
    failpoints: str = "",
    policy: Mapping[str, object] = {},
    replaces: bool = True,
    timeout_s: float = 60.0,
    meddle: Callable[[Job], None] | None = None,
) -> Outcome:
    """Runs `program(*arguments)` on workers of an elastic job until the job ends.

    Args:
        program: A module-level function.
        arguments: The arguments of the program.
        workers: The number of workers.
        failpoints: Failpoints; see `paceline.train.elastic.failpoints`.
        policy: The settings of the coordinator.
        replaces: True to replace workers that die.
        timeout_s: The number of seconds after which the job is killed and the test fails.
        meddle: A function that is called about every 10 ms and may kill or stop workers.
    """
    with_job = Job(program, arguments, workers, failpoints, policy, replaces)
    try:
        return with_job.run(timeout_s, meddle)
    finally:
        with_job.close()


class Job:
    """A running job; see `run`."""

    def __init__(
        self,
        program: Callable[..., object],
        arguments: tuple[object, ...],
        workers: int,
        failpoints: str,
        policy: Mapping[str, object],
        replaces: bool,
    ) -> None:
        self._program, self._arguments = program, arguments
        self._slots, self._replaces = workers, replaces
        self._directory = tempfile.mkdtemp(prefix="paceline-")
        self._secret = secrets.token_hex(32)
        self._store = StoreServer.on_unix_path(f"{self._directory}/store", self._secret.encode())
        self._environment = {
            "PACELINE_STORE": f"unix:{self._directory}/store",
            "PACELINE_SECRET": self._secret,
            "PACELINE_FAILPOINTS": failpoints,
            "WORLD_SIZE": str(workers),
        }
        self._coordinator = Coordinator(CoordinatorPolicy(**policy), time.monotonic())
        self._selector = selectors.DefaultSelector()
        start_server()
        self._attempts = [0] * workers
        self._end: EndOrder | None = None
        self.workers: dict[str, Worker] = {}
        self.outcome = Outcome(0, {}, {}, [], {})

    def run(self, timeout_s: float, meddle: Callable[[Job], None] | None) -> Outcome:
        """Runs the job; returns its outcome."""
        deadline_s = time.monotonic() + timeout_s
        self._follow(self._coordinator.machine_joined(MACHINE, "here", self._slots, time.monotonic()))
        self._follow(self._coordinator.machine_listed(MACHINE, time.monotonic()))
        while self._end is None or self.workers:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"the job did not end within {timeout_s:.0f} s: {self.outcome}")
            for key, _ in self._selector.select(0.01):
                worker, happens = key.data
                if worker.uid in self.workers:
                    happens(worker)
            if meddle is not None:
                meddle(self)
            self._follow(self._coordinator.tick(time.monotonic()))
        self.outcome.code = self._end.code
        return self.outcome

    def kill(self, uid: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a worker."""
        os.kill(self.workers[uid].process.pid or 0, number)

    def stall(self, uid: str) -> None:
        """Stops a worker, and reports that it is unresponsive."""
        self.kill(uid, signal.SIGSTOP)
        self._follow(self._coordinator.worker_stalled(uid, "stopped", time.monotonic()))

    def close(self) -> None:
        """Kills the processes that are still running; idempotent."""
        for worker in list(self.workers.values()):
            _end(worker)
        self.workers.clear()
        self._selector.close()
        self._store.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, slot: int) -> None:
        uid = f"{MACHINE}.{slot}.{self._attempts[slot]}"
        self._attempts[slot] += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        receiving, sending = context.Pipe(duplex=False)
        environment = {**self._environment, "PACELINE_WORKER": uid, "RANK": str(slot), "LOCAL_RANK": str(slot)}
        process = context.Process(
            target=_work, args=(self._program, self._arguments, environment, theirs, sending), daemon=False
        )
        process.start()
        theirs.close()
        sending.close()
        ours.setblocking(False)
        worker = self.workers[uid] = Worker(uid, slot, process, os.pidfd_open(process.pid or 0), ours, receiving)
        self._selector.register(ours, selectors.EVENT_READ, (worker, self._hear))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, (worker, self._bury))
        self._follow(self._coordinator.worker_started(uid, MACHINE, time.monotonic()))

    def _hear(self, worker: Worker) -> None:
        while True:
            try:
                datagram = worker.socket.recv(protocol.LARGEST_DATAGRAM)
            except OSError:
                return
            if not datagram:
                return
            message = protocol.decode_from_worker(datagram)
            self.outcome.heard.append((time.monotonic(), worker.uid, message))
            self._follow(self._coordinator.handle_worker_message(worker.uid, message, time.monotonic()))

    def _bury(self, worker: Worker) -> None:
        self._hear(worker)
        self._selector.unregister(worker.socket)
        self._selector.unregister(worker.pidfd)
        del self.workers[worker.uid]
        _end(worker)
        code = worker.process.exitcode or 0
        if worker.result.poll():
            try:
                is_error, value = worker.result.recv()
                (self.outcome.errors if is_error else self.outcome.results)[worker.uid] = value
            except EOFError:
                pass
        self.outcome.ended[worker.uid] = code
        self._follow(self._coordinator.worker_ended(worker.uid, f"exit code {code}", code, time.monotonic()))
        if self._end is None and self._replaces and code != 0 and self._attempts[worker.slot] < _MOST_ATTEMPTS:
            self._start(worker.slot)

    def _follow(self, orders: list[CoordinatorOrder]) -> None:
        for order in orders:
            match order:
                case SendOrder(_, uid, message):
                    if uid in self.workers:
                        with contextlib.suppress(OSError):  # the worker's exit is reported soon
                            self.workers[uid].socket.send(protocol.encode_message(message))
                case StartOrder():
                    for slot in range(self._slots):
                        self._start(slot)
                case EndOrder():
                    self._end = order
                    self.outcome.said.append(order.reason)
                    for worker in self.workers.values():
                        worker.process.kill()
                case NotifyOrder(text):
                    self.outcome.said.append(text)


def _end(worker: Worker) -> None:
    """Kills a worker, if it is running, and its child processes; returns when it has exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid or 0, signal.SIGKILL)
    worker.process.kill()
    worker.process.join()
    os.close(worker.pidfd)
    worker.socket.close()


def _work(
    program: Callable[..., object],
    arguments: tuple[object, ...],
    environment: dict[str, str],
    connection: socket.socket,
    result: Connection,
) -> None:
    begin()
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a worker of the real launcher
    os.environ.update(environment)
    os.environ["PACELINE_ELASTIC_FD"] = str(connection.detach())
    try:
        value = program(*arguments)
    except Exception as error:
        result.send((True, f"{type(error).__name__}: {error}"))
        raise
    result.send((False, value))
    result.close()
    dist.destroy_process_group()
    os._exit(0)  # a regular interpreter exit takes longer than the job
