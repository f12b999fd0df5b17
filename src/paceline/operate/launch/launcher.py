"""`Launcher`: the event loop on one machine, which handles orders, signals, deadlines and terminal suspension."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from abc import ABC, abstractmethod
from typing import Protocol

from paceline import __version__
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.dashboard_link import DashboardLink
from paceline.operate.launch.failures import report_parts
from paceline.operate.launch.job import Job
from paceline.operate.launch.job_directory import Events, JobDirectory, JobRecordings
from paceline.operate.launch.multinode.node_connection import NodeConnection
from paceline.operate.launch.multinode.protocol import (
    DashboardUpdate,
    DashboardWatched,
    JobEnded,
    JobMoved,
    JoinJob,
    Order,
    RequestSnapshot,
    SnapshotReport,
    StacksRequest,
    UserMessage,
)
from paceline.operate.launch.shared_secret import SlurmSecret
from paceline.operate.launch.watchdog import Watchdog
from paceline.operate.launch.workers.cleanup import Cleanup
from paceline.operate.launch.workers.environment import compat_variables, inherited_variables
from paceline.operate.launch.workers.job_control import Keyboard, Signals
from paceline.operate.launch.workers.output import Console, Logs
from paceline.operate.launch.workers.start_workers import MachineResources
from paceline.operate.launch.workers.worker import WorkerProcess
from paceline.operate.launch.workers.worker_stores import multiplexer_variables
from paceline.train.checkpoint.peer_memory.server import CacheServer


class Workers(Protocol):
    """The running workers on this machine."""

    def pids(self) -> list[int]:
        """Returns the process ids of workers that have not been reaped yet."""

    def interactive(self) -> WorkerProcess | None:
        """Returns the worker that is waiting for typed input, or None."""

    def signal(self, number: int) -> None:
        """Sends a signal to every running worker."""

    def resize(self) -> None:
        """Forwards the terminal's current size to the workers that write to it."""

    def kill(self) -> None:
        """Kills the workers immediately."""


class Launcher(ABC):
    """The launcher on one machine. Subclasses own the workers, and decide what happens after a worker exits."""

    word = "rank"  # noun for the workers' numbers in line prefixes
    moved: JobMoved | None = None  # another job that this machine must join instead

    def __init__(
        self, job: Job, connection: NodeConnection, secret: bytes | None, shared: SlurmSecret, cleanup: Cleanup
    ) -> None:
        self._job = job
        self._connection = connection
        self._secret = secret
        self._shared = shared
        self._cleanup = cleanup
        self._machine = MachineResources.mine(job)
        self._keyboard = Keyboard()
        others = (signal.SIGWINCH, signal.SIGTSTP) if self._keyboard.is_terminal else (signal.SIGWINCH,)
        self._signals = Signals(job.signals, others)
        self._console = Console(lambda: self._signals.has_arrived)
        self._print_line = self._console.print_line
        self._directory = JobDirectory(job)
        self._recordings = JobRecordings(self._directory.path)
        self._copies = CacheServer(None if job.rendezvous.address is None else connection.address)
        path = self._directory.path
        self._dashboard = DashboardLink(job, connection, secret is not None, path, self._print_line, self._watched)
        local = self._dashboard.local
        sink, listener = (local.sink, local.note_event) if local is not None else (None, None)
        self._logs = Logs(job.output, path, self._console, self.word, sink, self._dashboard.has_page)
        self._events = Events(job.events, job.run_id, self._console, path, listener)
        self._stopped_by: signal.Signals | None = None
        self._end: JobEnded | None = None
        self._world = range(0)  # all ranks in the latest generation
        self._selector = selectors.DefaultSelector()
        self._watcher = Watchdog(job.stall_after_s, self._watched, self._on_snapshot)
        self._headlines: list[str] = []  # printed before the report of the failures
        self._final_messages: list[str] = []  # printed after the report

    def __enter__(self) -> Launcher:
        self._selector.register(self._signals.fileno(), selectors.EVENT_READ, self._on_signal)
        self._selector.register(self._connection.client.fileno(), selectors.EVENT_READ, self._on_orders)
        self._selector.register(self._watcher.fileno(), selectors.EVENT_READ, self._watcher.collect)
        return self

    def __exit__(self, *_: object) -> None:
        self._watcher.close()
        self._close_workers()
        self._copies.close()
        self._recordings.close()
        self._selector.close()
        self._signals.close()
        self._dashboard.close()

    def run(self) -> int:
        """Runs this machine's part of the job; returns the exit code."""
        for line in [*self._machine.remarks(self._job), *filter(None, [self._directory.remark])]:
            self._print_line(line)
        self._connection.client.send(self._join())
        while not self._is_over():
            for key, _ in self._selector.select(self._wait_s()):
                if key.fd in self._selector.get_map():  # an earlier handler may have closed the descriptor
                    key.data()
            self._on_time()
        assert self._end is not None
        code = self._conclude(self._end)
        self._dashboard.over("stopped" if self._stopped_by is not None else "failed" if code else "finished")
        self._directory.conclude(code, self._stopped_by is not None, self._connection.client.clock_offset())
        return code

    @abstractmethod
    def _running_workers(self) -> Workers | None:
        """Returns the running workers, or None."""

    @abstractmethod
    def _watched(self) -> list[WatchedWorker]:
        """Returns the workers in the form required by the watchdog and the dashboard."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Returns True if the job has ended and no workers are running."""

    @abstractmethod
    def _follow(self, order: Order) -> None:
        """Executes an order from the rendezvous."""

    @abstractmethod
    def _deadlines(self) -> list[float | None]:
        """Returns the times (monotonic) at which `_tick` must be called; None for never."""

    @abstractmethod
    def _tick(self, now_s: float) -> None:
        """Performs timed actions and detects workers that have exited."""

    @abstractmethod
    def _stop(self, number: signal.Signals) -> None:
        """Stops the workers after a signal from the user or the scheduler."""

    @abstractmethod
    def _close_workers(self) -> None:
        """Kills workers that are still running and releases their resources; idempotent."""

    def _join(self) -> JoinJob:
        job, connection = self._job, self._connection
        port, store_port = self._ports()
        return JoinJob(
            host=socket.gethostname(),
            pid=os.getpid(),
            address=connection.address,
            port=port,
            workers=job.workers,
            role=job.role,
            node_rank=job.rendezvous.node_rank,
            serves=connection.serves,
            version=__version__,
            is_elastic=job.elastic is not None,
            listens=connection.listens,
            store_port=store_port,
            job=job.rendezvous.running[0] if job.rendezvous.running is not None else "",
        )

    @abstractmethod
    def _ports(self) -> tuple[int, int]:
        """Returns the ports for torch's store and for Paceline's store, in case rank 0 runs on this machine."""

    def _environment(self, mark: str) -> dict[str, str]:
        """Returns the environment variables shared by the workers; `mark` identifies workers that start together."""
        shared = inherited_variables(self._machine.environment(os.environ))
        return {
            **shared,
            **multiplexer_variables(),
            **compat_variables(self._job.compat, shared),
            **self._cleanup.variables(mark),
        }

    def _wait_s(self) -> float | None:
        sources = (self._connection.client, self._watcher, self._dashboard)
        deadlines = (*(source.deadline_s for source in sources), *self._deadlines())
        known = [deadline_s for deadline_s in deadlines if deadline_s is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _on_time(self) -> None:
        now_s = time.monotonic()
        deadline_s = self._connection.client.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            self._on_orders()
        self._watcher.tick(now_s)
        self._dashboard.tick(now_s)
        self._tick(now_s)

    def _on_orders(self) -> None:
        for order in self._connection.client.receive():
            match order:
                case RequestSnapshot(is_failure=True, is_deep=is_deep):
                    self._watcher.start_failure_snapshot(is_deep)
                case RequestSnapshot():
                    self._watcher.start_snapshot(is_requested=True)
                case UserMessage(text, is_last=True, is_headline=is_headline):
                    (self._headlines if is_headline else self._final_messages).append(text)
                case DashboardWatched(is_on):
                    self._dashboard.send_to_dashboard(is_on)
                case StacksRequest():
                    self._dashboard.take_stacks()
                case DashboardUpdate(body):
                    self._dashboard.seen(body)
                case UserMessage(text):
                    if not order.is_failure:  # for a failure, the event has already been written
                        kind = "stall" if order.is_stall else "resume"
                        self._events.write(kind, reason=text, ranks=list(order.blamed))
                    self._print_line(text)
                    self._dashboard.stalled(order)
                case _:
                    self._follow(order)

    def _on_snapshot(self, snapshot: str, is_failure: bool) -> None:
        """Reports a snapshot of the workers, given as JSON; "" means that the workers have resumed."""
        self._connection.client.send(SnapshotReport(snapshot, is_failure=is_failure))
        if snapshot and not is_failure and self._directory.path is not None:
            with contextlib.suppress(OSError):  # e.g. the disk is full
                (self._directory.path / f"stall-{socket.gethostname()}-{os.getpid()}.json").write_text(snapshot)

    def _on_signal(self) -> None:
        numbers, others = self._signals.read()
        workers = self._running_workers()
        if signal.SIGCHLD in others:
            self._on_children(workers)
        if signal.SIGWINCH in others and workers is not None:
            workers.resize()
        if signal.SIGTSTP in others:
            self._pause(workers)
        for number in numbers:
            self._on_end_signal(number, workers)

    def _pause(self, workers: Workers | None) -> None:
        """Suspends the workers (each in its own session) and this process until the shell resumes this process.

        While a worker is waiting for typed input, the job only resumes in the foreground, like any program that reads
        from the terminal.
        """
        waits = workers is not None and workers.interactive() is not None
        attributes = self._keyboard.attributes()
        if workers is not None:
            workers.signal(signal.SIGSTOP)
        self._keyboard.restore()
        self._signals.stop_here(signal.SIGTSTP)
        while waits and not self._keyboard.is_ours():
            self._signals.stop_here(signal.SIGTTIN)
            time.sleep(0.05)
        self._keyboard.set(attributes)
        if workers is not None:
            workers.signal(signal.SIGCONT)
        self._console.redraw()

    def _on_end_signal(self, number: signal.Signals, workers: Workers | None) -> None:
        if self._stopped_by is not None:
            if workers is not None:
                workers.kill()
        elif number == signal.SIGINT and workers is not None and (worker := workers.interactive()):
            self._on_interrupt(worker)
            os.kill(worker.pid, number)
        else:
            self._stop(number)

    def _on_children(self, workers: Workers | None) -> None:
        """Reaps adopted processes after SIGCHLD, which is sent when a child has exited, stopped or continued."""
        self._cleanup.reap(workers.pids() if workers is not None else [])

    def _on_interrupt(self, worker: WorkerProcess) -> None:
        """Records that Ctrl-C is forwarded only to this worker, because the worker is waiting for typed input."""

    def _conclude(self, end: JobEnded) -> int:
        if self._stopped_by is not None:
            return 1
        self._events.write("end", code=end.code)
        for text in self._headlines:
            self._print_line(text)
        if end.failures:
            for part in report_parts(end.failures, self._world, self.word, self._console.is_in_view):
                self._print_line(part)
        for text in self._final_messages:
            self._print_line(text)
        if end.reason:
            self._print_line(end.reason)
        return end.code
