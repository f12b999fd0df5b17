"""Starts the workers of one machine, passes on their output, and ends all of them when one fails or a signal comes."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch import bootstrap
from paceline.launch.environment import allowed_cores, free_port, threads_per_worker, worker_environment
from paceline.launch.failures import Failure, describe, first_failure, read_record, shell_code
from paceline.launch.lifeline import Guard, kill_group
from paceline.launch.output import LinePrefixer, prefix_of, writer
from paceline.store.server import StoreServer

GRACE_S = 5.0  # between the request to end and SIGKILL
_CONSEQUENCES_S = 0.5  # after a failure, for the ranks that end because of it to say so themselves
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Job:
    """What to run: `command` is a script or, with `is_module`, a module, and its arguments."""

    command: Sequence[str]
    workers: int
    is_module: bool = False
    port: int | None = None


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    error_file: str
    pidfd: int
    streams: list[LinePrefixer] = field(default_factory=list)
    ended: bool = False


def run(job: Job) -> int:
    """Runs the job to its end; the exit code for the shell."""
    directory = tempfile.mkdtemp(prefix="paceline-")
    guard = Guard(directory)
    try:
        with _Agent(job, directory, guard) as agent:
            return agent.run()
    finally:
        guard.close()
        shutil.rmtree(directory, ignore_errors=True)


class _Agent:
    def __init__(self, job: Job, directory: str, guard: Guard) -> None:
        self._job = job
        self._directory = Path(directory)
        self._guard = guard
        self._workers: list[_Worker] = []
        self._failures: list[Failure] = []
        self._stopped_by: int | None = None
        self._next_signal: tuple[float, int] | None = None  # when (monotonic) the workers get which signal
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Agent:
        secret = secrets.token_bytes(32)
        self._secret_fd = os.memfd_create("paceline-secret", 0)
        os.write(self._secret_fd, secret)
        self._store_path = str(self._directory / "store")
        self._store = StoreServer.on_unix_path(self._store_path, secret)
        self._wake, waking = os.pipe()
        os.set_blocking(waking, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            kill_group(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._store.close()
        os.close(self._secret_fd)

    def run(self) -> int:
        self._start_workers()
        while self._selector.get_map() and not self._all_over():
            timeout_s = None if self._next_signal is None else max(0.0, self._next_signal[0] - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                key.data()
            if self._next_signal is not None and time.monotonic() >= self._next_signal[0]:
                self._signal_all(self._next_signal[1])
                self._next_signal = (time.monotonic() + GRACE_S, signal.SIGKILL)
        for worker in self._workers:
            for stream in worker.streams:
                stream.close()
        return self._conclude()

    def _start_workers(self) -> None:
        job = self._job
        environment = {**os.environ}
        threads = threads_per_worker(allowed_cores(), job.workers, environment)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
            if job.workers > 1:
                _say(
                    f"OMP_NUM_THREADS={threads} for each of {job.workers} workers; set it yourself to choose otherwise"
                )
        environment["PACELINE_STORE"] = f"unix:{self._store_path}"
        environment["PACELINE_SECRET_FD"] = str(self._secret_fd)
        environment.setdefault("PYTHONUNBUFFERED", "1")
        port = job.port if job.port is not None else free_port()
        run_id = secrets.token_hex(8)
        module = ["-m"] if job.is_module else []
        for rank in range(job.workers):
            error_file = str(self._directory / f"error-{rank}.json")
            process = subprocess.Popen(
                [sys.executable, bootstrap.__file__, str(os.getpid()), *module, *job.command],
                env={
                    **environment,
                    **worker_environment(rank, job.workers, port, run_id),
                    "PACELINE_ERROR_FILE": error_file,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[self._secret_fd],
                start_new_session=True,
            )
            worker = _Worker(rank, process, error_file, os.pidfd_open(process.pid))
            self._workers.append(worker)
            self._guard.watch([process.pid])
            self._follow(worker)

    def _follow(self, worker: _Worker) -> None:
        for pipe, own in ((worker.process.stdout, sys.stdout), (worker.process.stderr, sys.stderr)):
            assert pipe is not None
            stream = LinePrefixer(prefix_of(worker.rank, own.isatty()), writer(own.fileno()))
            worker.streams.append(stream)

            def read(fd: int = pipe.fileno(), stream: LinePrefixer = stream) -> None:
                data = os.read(fd, _READ_BYTES)
                if data:
                    stream.feed(data)
                else:
                    self._selector.unregister(fd)

            self._selector.register(pipe.fileno(), selectors.EVENT_READ, read)

        def ended() -> None:
            self._selector.unregister(worker.pidfd)
            os.close(worker.pidfd)
            self._on_end(worker)

        self._selector.register(worker.pidfd, selectors.EVENT_READ, ended)

    def _on_end(self, worker: _Worker) -> None:
        worker.ended = True
        code = worker.process.wait()
        if code == 0:
            return
        record = read_record(worker.error_file)
        if self._next_signal is None:
            self._next_signal = (time.monotonic() + _CONSEQUENCES_S, signal.SIGTERM)
        elif record is None and code in (-signal.SIGTERM, -signal.SIGKILL):
            return  # it ended because it was told to
        exit_code = 1 if record is not None else code  # its exception decides, also when it was slow to end
        self._failures.append(Failure(worker.rank, worker.process.pid, exit_code, time.time(), record))

    def _on_signal(self) -> None:
        for number in os.read(self._wake, 64):
            if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                continue
            if self._stopped_by is not None:
                self._signal_all(signal.SIGKILL)
                continue
            self._stopped_by = number
            _say(f"{signal.Signals(number).name}: ending {len(self._workers)} workers (again to kill them)")
            self._signal_all(number)
            self._next_signal = (time.monotonic() + GRACE_S, signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            if not worker.ended:
                kill_group(worker.process.pid, signal.SIGCONT)  # a stopped worker would not hear it
                kill_group(worker.process.pid, number)

    def _all_over(self) -> bool:
        """Every worker has ended and its output is passed on; what its children hold open is not waited for."""
        if not all(worker.ended for worker in self._workers):
            return False
        ready = self._selector.select(0)
        return not any(key.data is not self._on_signal for key, _ in ready)

    def _conclude(self) -> int:
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        if not self._failures:
            return 0
        first = first_failure(self._failures)
        others = [str(worker.rank) for worker in self._workers if worker.rank != first.rank]
        _say(describe(first))
        if others:
            _say(f"the other ranks ({', '.join(others)}) were ended")
        return shell_code(first.exit_code)


def _say(text: str) -> None:
    writer(sys.stderr.fileno())(f"paceline: {text}\n".encode())
