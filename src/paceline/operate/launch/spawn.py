"""Runs a function in several processes on this machine, from a script (`spawn`) or a notebook (`notebook_launch`).

While the caller is waiting in `ProcessContext.join`, a watchdog diagnoses stalls and failures of the processes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TextIO, cast

from paceline import linux
from paceline.comm.record.recorder import DIRECTORY_VARIABLE, SUFFIX, directory_of_files
from paceline.comm.record.recorder import HANDED_VARIABLE as RECORD_FD
from paceline.comm.security.secret import SECRET_FD_VARIABLE as SECRET_FD
from paceline.comm.store.tcp_store import StoreServer
from paceline.errors import WorkerError, short_repr
from paceline.linux import die_with_parent
from paceline.operate.diagnosis.stall_detector import StallReporter, WatchedWorker, explain_or_default
from paceline.operate.launch.failures import Record, WorkerFailure
from paceline.operate.launch.watchdog import Watchdog, ending_of
from paceline.operate.launch.workers.bootstrap import offer_stack
from paceline.operate.launch.workers.environment import allowed_cores, free_port, threads_per_worker, worker_environment

if TYPE_CHECKING:
    from paceline.operate.diagnosis.finding import Diagnosis
    from paceline.operate.diagnosis.job_snapshot import RankExitStatus
    from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot

_GRACE_S = 5.0


def spawn(
    fn: Callable[..., object],
    args: tuple[object, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    stall_after: float = 15.0,
) -> ProcessContext | None:
    """Calls `fn(rank, *args)` in `nprocs` processes, where `init_process_group()` does not need any arguments.

    Args:
        fn: The function to call. It must be in an importable module, except with start_method="fork".
        args: Additional arguments for the function.
        nprocs: The number of processes.
        join: Whether to wait for the processes. If False, returns a `ProcessContext`, whose method `join` waits.
        daemon: Whether the processes are terminated when this process exits normally. (If this process is killed, the
            processes are always terminated.)
        start_method: "spawn", "forkserver" or "fork". Each fork computes with a single thread.
        stall_after: The duration in seconds after which a call counts as stalled. If a call stalls while the caller is
            waiting, one sentence on stderr reports the missing rank and the reason. 0 disables these reports.

    Raises:
        TypeError: `args` is not a tuple.
        ValueError: `nprocs` is less than 1, or the processes cannot import `fn`.
        WorkerError: a process failed (only with `join`). The message ends with the traceback.
    """
    if nprocs < 1:
        raise ValueError(f"nprocs is {nprocs}; it must be at least 1")
    if start_method != "fork" and fn.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"{fn.__qualname__} is defined in an interactive session, which new processes cannot import; "
            'pass start_method="fork", or put it into a module'
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"spawn: args is {short_repr(args)}; it must be a tuple, such as ({short_repr(args)},)")
    if start_method != "fork" and "<" in getattr(fn, "__qualname__", ""):  # a local function or a lambda
        raise ValueError(
            f"spawn: {fn.__qualname__} is defined inside a function or is a lambda, which new processes cannot import; "
            'define it at the top level of a module, or pass start_method="fork"'
        )
    context = cast(SpawnContext, multiprocessing.get_context(start_method))  # all contexts have these methods
    directory = tempfile.mkdtemp(prefix="paceline-")
    secret = secrets.token_hex(32)
    store = StoreServer.on_unix_path(os.path.join(directory, "store"), secret.encode())
    port, run_id = free_port(), secrets.token_hex(8)
    threads = threads_per_worker(allowed_cores(), nprocs, os.environ)
    recordings, started_ns = directory_of_files(), time.time_ns()
    processes: list[BaseProcess] = []
    failures: list[Connection] = []
    for rank in range(nprocs):
        environment = {
            **worker_environment(rank, nprocs, port, run_id),
            "PACELINE_STORE": f"unix:{directory}/store",
            "PACELINE_SECRET": secret,
            DIRECTORY_VARIABLE: recordings,
        }
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(fn, rank, args, environment, threads, sending, os.getpid(), start_method), daemon=daemon
        )
        process.start()
        sending.close()
        processes.append(process)
        failures.append(receiving)
    watch = SpawnWatchdog(processes, started_ns, recordings, stall_after)
    spawned = ProcessContext(processes, failures, store, directory, watch)
    if not join:
        return spawned
    spawned.join()
    return None


def notebook_launch(
    fn: Callable[..., object], nprocs: int, args: tuple[object, ...] = (), start_method: str | None = None
) -> None:
    """Calls `fn(rank, *args)` in `nprocs` processes from a notebook cell, like `spawn` from a script.

    A function defined in the notebook runs in forks of the notebook's process. A function defined in a module is
    imported by new processes, which is always safe.

    >>> import paceline
    >>> paceline.notebook_launch(print, nprocs=1)  # doctest: +SKIP

    Args:
        fn: A function defined in the notebook or in a module.
        nprocs: The number of processes.
        args: Additional arguments for the function.
        start_method: "fork", "spawn" or "forkserver". Default: "fork" for a function defined in the notebook, else
            "spawn". Each fork computes with a single thread.

    Raises:
        RuntimeError: the start method is "fork", but this process has already used CUDA, which forks cannot share.
        WorkerError: a process failed. The message ends with the traceback.
    """
    if start_method is None:
        start_method = "fork" if fn.__module__ == "__main__" else "spawn"
    torch = sys.modules.get("torch")
    if start_method == "fork" and torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            f"{fn.__qualname__} was to run in forks of this notebook (pid {os.getpid()}), but a cell has already used "
            "CUDA here, and forked processes cannot use CUDA after that. Restart the notebook and do not use a GPU "
            "before this call, or put the function into a module"
        )
    if start_method == "fork" and linux.has_opened(linux.CUDA_DEVICE):
        warnings.warn(
            f"{fn.__qualname__} runs in forks of this notebook (pid {os.getpid()}), which cannot use CUDA, because a "
            "cell has initialized CUDA's driver, for example with torch.cuda.is_available(). If the function uses a "
            "GPU, restart the notebook and set PYTORCH_NVML_BASED_CUDA_CHECK=1 in its first cell, or put the function "
            "into a module",
            stacklevel=2,
        )
    sys.stdout.flush()
    if start_method == "fork":
        fn = functools.partial(_print_whole_lines, fn)
    spawned = spawn(fn, args, nprocs, join=False, start_method=start_method)
    assert spawned is not None
    try:
        spawned.join()
    except KeyboardInterrupt:  # raised by the notebook's stop button
        spawned.end()
        raise


class ProcessContext:
    """The processes started by `spawn(..., join=False)`."""

    def __init__(
        self,
        processes: list[BaseProcess],
        failures: list[Connection],
        store: StoreServer,
        directory: str,
        watch: SpawnWatchdog,
    ) -> None:
        self._processes = processes
        self._failures = dict(enumerate(failures))  # pipes, by rank, of processes that have not reported a failure
        self._reports: dict[int, Record] = {}  # by rank
        self._watchdog = watch
        self._release = weakref.finalize(self, _release, store, directory, self._watchdog)

    def pids(self) -> list[int]:
        """Returns the process ids, ordered by rank."""
        return [process.pid or 0 for process in self._processes]

    def join(self, timeout: float | None = None) -> bool:
        """Waits for all processes to exit; returns False if any process is still running after `timeout` seconds.

        If the processes stall during the wait, one sentence on stderr reports the rank that causes the stall.

        Raises:
            WorkerError: a process failed. The message contains the traceback of the first failure. The other processes
                have been terminated.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # read once, because each access polls the process
            codes = [process.exitcode for process in self._processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    self._fail(rank)
            running = [process.sentinel for process, code in zip(self._processes, codes, strict=True) if code is None]
            if not running:
                self._watchdog.conclude()
                self._release()
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._wait(running, deadline)

    def end(self) -> None:
        """Terminates the processes that are still running."""
        for process in self._processes:
            if process.exitcode is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._release()

    def _wait(self, running: list[int], deadline_s: float | None) -> None:
        watchdog = self._watchdog.watchdog
        deadlines = [time_s for time_s in (deadline_s, watchdog.deadline_s) if time_s is not None]
        timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = wait([*running, watchdog.fileno(), *self._failures.values()], timeout_s)
        self._collect()
        if watchdog.fileno() in ready:
            watchdog.collect()
        watchdog.tick(time.monotonic())

    def _collect(self) -> None:
        for rank, failure in list(self._failures.items()):
            if failure.poll():
                del self._failures[rank]  # a process reports at most one exception, then closes the pipe
                with contextlib.suppress(EOFError):
                    self._reports[rank] = Record(*failure.recv())
                    self._watchdog.raised(rank, self._reports[rank])

    def _fail(self, seen: int) -> None:
        time.sleep(0.1)  # the report of a failure that caused this one may still arrive
        self._collect()
        why = self._watchdog.why()
        self.end()
        self._collect()
        host = socket.gethostname()
        first = min(self._reports, key=lambda rank: self._reports[rank].time_s) if self._reports else seen
        code = self._processes[first].exitcode
        text = self._reports[first].text if self._reports else "it left no traceback; look at its output"
        head = (
            f"rank {first} ({host}, pid {self._processes[first].pid}, exit code {code}) failed first; the other ranks "
            "were terminated:"
        )
        parts = [head, text.rstrip(), why]
        raise WorkerError("\n".join(part for part in parts if part), rank=first, exit_code=code)


class SpawnWatchdog:
    """Monitors processes until `close` is called, with a `watchdog` driven by the waiting thread.

    `started_ns` is the time of day at which the first process started, and `directory` contains their recordings.
    """

    def __init__(self, processes: Sequence[BaseProcess], started_ns: int, directory: str, stall_after_s: float) -> None:
        self._processes = processes
        self._started_ns = started_ns
        self._directory = directory
        self._recordings: dict[int, int] = {}  # descriptors for recordings, by rank
        self._exceptions: dict[int, Record] = {}  # by rank
        self._reporter = StallReporter()
        self._started_s = time.monotonic()
        self._is_on = stall_after_s > 0
        self.watchdog = Watchdog(stall_after_s, self._watched, self._report)

    def raised(self, rank: int, record: Record) -> None:
        """Records the exception that terminated a rank."""
        self._exceptions[rank] = record

    def why(self) -> str:
        """Returns a sentence about the cause of a failure, or "" if unknown."""
        from paceline.operate.diagnosis.failure_snapshot import snapshot_failed_job

        snapshot = explain_or_default(lambda: snapshot_failed_job(self._watched()), None) if self._is_on else None
        verdict = _verdict_on(snapshot) if snapshot is not None else None
        return verdict.sentence if verdict is not None and verdict.is_fault else ""

    def conclude(self) -> None:
        """Reports stragglers after a successful job that ran long enough."""
        if self.watchdog.should_read_final_recordings(False, time.monotonic() - self._started_s, len(self._processes)):
            from paceline.operate.diagnosis.machine_snapshot import snapshot_ended_workers
            from paceline.operate.diagnosis.stragglers import describe_slowdowns

            for text in explain_or_default(lambda: describe_slowdowns([snapshot_ended_workers(self._watched())]), []):
                _print_line(text)

    def close(self) -> None:
        """Waits for a snapshot in progress, and closes the recordings; idempotent."""
        self.watchdog.close(lives_on=True)
        for recording in self._recordings.values():
            os.close(recording)
        self._recordings.clear()

    def _watched(self) -> list[WatchedWorker]:
        self._find_recordings()
        return [
            WatchedWorker(rank, process.pid or 0, self._recordings.get(rank), self._ending(rank, process))
            for rank, process in enumerate(self._processes)
        ]

    def _find_recordings(self) -> None:
        """Opens new recordings. A process creates its recording together with its first group."""
        missing = {
            str(process.pid): rank for rank, process in enumerate(self._processes) if rank not in self._recordings
        }
        if not missing:
            return
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                begun_ns, _, pid = name.removesuffix(SUFFIX).partition("-")
                if pid in missing and begun_ns.isdecimal() and int(begun_ns) >= self._started_ns:
                    path = os.path.join(self._directory, name)
                    self._recordings[missing[pid]] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _ending(self, rank: int, process: BaseProcess) -> RankExitStatus | None:
        record = self._exceptions.get(rank)
        if process.exitcode is None and record is None:
            return None
        code = 1 if process.exitcode is None else process.exitcode
        has_failed = record is not None or code != 0
        failure = WorkerFailure(rank, process.pid or 0, code, time.time(), record) if has_failed else None
        return ending_of(code, failure)

    def _report(self, body: str, _: bool) -> None:
        """Diagnoses a stall from a snapshot, given as JSON; "" means that the processes have resumed."""
        if not body:
            if (resumed := self._reporter.resumed(time.monotonic())) is not None:
                _print_line(resumed)
            return
        from paceline.operate.diagnosis.machine_snapshot import decode

        snapshot = decode(body)
        verdict = _verdict_on(snapshot)
        if verdict is not None and snapshot.stalled_since_s is not None:
            text = self._reporter.report(verdict, snapshot.stalled_since_s)
            if text is not None:
                _print_line(text)


def _verdict_on(snapshot: MachineSnapshot) -> Diagnosis | None:
    from paceline.operate.diagnosis.diagnosis import diagnose
    from paceline.operate.diagnosis.machine_snapshot import job_snapshot_of

    return explain_or_default(lambda: diagnose(job_snapshot_of([snapshot])), None)


def _print_line(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")


class WholeLines(io.TextIOBase):
    """Forwards text to another stream in whole lines.

    A fork of a notebook's process sends every piece of text to the notebook immediately, and `print` writes the newline
    separately. Without this class, output from other processes could appear in between.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding

    def writable(self) -> bool:
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Returns True if the stream is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Forwards all complete lines."""
        whole, end, self._held = (self._held + text).rpartition("\n")
        if end:
            self._stream.write(whole + end)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Forwards all text, including an incomplete line, as progress bars require."""
        held, self._held = self._held, ""
        if held:
            self._stream.write(held)
        self._stream.flush()


def _print_whole_lines(fn: Callable[..., object], rank: int, *args: object) -> None:
    with contextlib.redirect_stdout(cast(TextIO, WholeLines(sys.stdout))):
        try:
            fn(rank, *args)
        finally:
            sys.stdout.flush()


def _work(
    fn: Callable[..., object],
    rank: int,
    args: tuple[object, ...],
    environment: dict[str, str],
    threads: int | None,
    failure: Connection,
    parent: int,
    start_method: str,
) -> None:
    # the parent of these processes is the forkserver, which exits with this process
    if start_method != "forkserver":
        die_with_parent(parent)
    os.environ.update(environment)
    for name in (SECRET_FD, RECORD_FD):  # these variables belong to an outer job
        os.environ.pop(name, None)
    offer_stack()
    torch = sys.modules.get("torch")
    if torch is not None and start_method == "fork":
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and the child would wait for them forever
    elif torch is not None and threads is not None:
        torch.set_num_threads(threads)
    try:
        fn(rank, *args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        failure.send((time.time(), type(error).__name__, traceback.format_exc()))
        raise SystemExit(1) from None


def _release(store: StoreServer, directory: str, watch: SpawnWatchdog) -> None:
    watch.close()
    store.close()
    shutil.rmtree(directory, ignore_errors=True)
