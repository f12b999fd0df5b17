"""`WorkerGroup`: the workers of one generation on this machine, monitored until the last one has exited."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from paceline.operate.launch.failures import (
    ExceptionNotice,
    Record,
    WorkerFailure,
    first_failure,
    read_record,
    write_error_json,
)
from paceline.operate.launch.job_directory import RecordingMemory
from paceline.operate.launch.workers.environment import WorkerRanks
from paceline.operate.launch.workers.forker import Forker, ForkRequest
from paceline.operate.launch.workers.job_control import Keyboard
from paceline.operate.launch.workers.output import WorkerOutput
from paceline.operate.launch.workers.placement import Cores
from paceline.operate.launch.workers.worker import (
    MemoryWatch,
    OutputForwarder,
    WorkerProcess,
    failure_of,
    watch_end,
)

CONSEQUENCES_S = 0.5  # time for ranks to report failures that another failure has caused
_OTHERS_KILLED_S = 0.3  # time to wait for the exit of another worker killed for lack of memory


@dataclass(frozen=True)
class WorkerSpec:
    """A worker that is ready to start."""

    place: WorkerRanks
    argv: list[str]
    variables: dict[str, str]
    cores: Cores | None
    outputs: list[WorkerOutput]
    reads: bool
    error_file: str
    log: str | None
    memory: RecordingMemory | None

    def request(self, on_start: Callable[[int], None], channel: socket.socket | None = None) -> ForkRequest:
        """Returns the request to start this worker."""
        streams = (0 if self.reads else None, self.outputs[0].writing, self.outputs[-1].writing)
        return ForkRequest(self.argv, self.variables, streams, self.cores, on_start, channel)

    def close(self) -> None:
        """Frees the memory and the streams of a worker that was not started."""
        for output in self.outputs:
            output.close()
        if self.memory is not None:
            self.memory.release()

    def started(self, pid: int) -> WorkerProcess:
        """Returns the worker that runs as process `pid`.

        Raises:
            ProcessLookupError: the process has exited and was reaped.
        """
        rank, local_rank = self.place.rank, self.place.local_rank
        return WorkerProcess(rank, local_rank, pid, self.error_file, watch_end(pid), self.log, self.reads, self.memory)


class WorkerGroup:
    """The workers of one generation. Created by `start_workers`, and complete when `is_over` is true.

    Args:
        number: The number of the generation in the job, starting at 1.
        size: The number of workers in the generation on this machine.
        shutdown_timeout_s: The time between the stop signal and SIGKILL.
        keyboard: The launcher's stdin, which one of the workers may read.
        selector: The selector of the launcher's loop; its keys carry functions without arguments.
        notice: The pipe through which workers announce exceptions.
        forker: The forker that starts the workers.
        on_start: Called with the process id of each worker.
        on_exception: Called after an uncaught exception, before the worker exits.
        on_failure: Called with the first failure of an exited worker. The call is delayed briefly if the kernel killed
            several workers for lack of memory, because another of these workers may be the cause.
    """

    def __init__(
        self,
        number: int,
        size: int,
        shutdown_timeout_s: float,
        keyboard: Keyboard,
        selector: selectors.BaseSelector,
        notice: ExceptionNotice,
        forker: Forker,
        on_start: Callable[[int], None],
        on_exception: Callable[[WorkerFailure], None],
        on_failure: Callable[[WorkerFailure], None],
    ) -> None:
        self.number = number
        self._size = size
        self.failures: list[WorkerFailure] = []
        self.exceptions: dict[int, WorkerFailure] = {}  # by rank, announced before the worker exited
        self.workers: list[WorkerProcess] = []
        self.recordings: dict[int, int] = {}  # descriptors of recordings, by rank, including those of exited workers
        self._selector = selector
        self._forker = forker
        self._unstarted: list[WorkerSpec] = []
        self._on_start = on_start
        self._on_exception = on_exception
        self._on_failure = on_failure
        self._notice = notice
        if (descriptor := notice.fileno()) is not None:
            selector.register(descriptor, selectors.EVENT_READ, self._on_exception_notice)
        self._keyboard = keyboard
        self._forwarders: list[OutputForwarder] = []
        self._memory = MemoryWatch()
        self._killed: list[tuple[float, int]] = []  # time and peak memory of workers killed for lack of memory
        self._grace_s = shutdown_timeout_s
        self._next_signal: tuple[float, int] | None = None  # time (monotonic) and number of the next signal
        self._requested_s: float | None = None  # time of day at which the workers were asked to exit
        self._report_s: float | None = None  # time (monotonic) at which to report the first failure, if delayed

    def start(self, spec: WorkerSpec) -> None:
        """Starts a worker after the previous workers, immediately or once the template process is ready."""
        self._unstarted.append(spec)
        self._forker.start(spec.request(partial(self._started, spec)))

    def _started(self, spec: WorkerSpec, pid: int) -> None:
        self._unstarted.remove(spec)
        self._on_start(pid)
        self._watch_exit(spec.started(pid), spec.outputs)
        if len(self.workers) == self._size:
            self._forker.close()
        if self._requested_s is not None:  # the workers were asked to exit while this one was being forked
            self.workers[-1].signal(signal.SIGKILL)

    def _start_no_more(self) -> None:
        self._forker.finish()
        for spec in self._unstarted:
            spec.close()
        self._unstarted.clear()

    def _watch_exit(self, worker: WorkerProcess, outputs: list[WorkerOutput]) -> None:
        """Monitors a worker that has just been started: forwards its output, and detects its exit."""
        self.workers.append(worker)
        if worker.memory is not None:
            with contextlib.suppress(OSError):  # out of descriptors
                self.recordings[worker.rank] = os.dup(worker.memory.fd)
        forwarder = OutputForwarder(worker, outputs, self._selector)
        self._forwarders.append(forwarder)

        def ended() -> None:
            self._selector.unregister(worker.pidfd)
            code = worker.collect()
            if code < 0:
                forwarder.drain()  # the stack of a crash
            self._ended(worker, code, forwarder.tail)

        self._selector.register(worker.pidfd, selectors.EVENT_READ, ended)

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `tick` must be called; None for never."""
        signal_s = self._next_signal[0] if self._next_signal is not None else None
        prompts_s = (forwarder.deadline_s for forwarder in self._forwarders)
        times_s = [signal_s, self._report_s, self._forker.deadline_s, *prompts_s]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Performs the actions that are due at `now_s`: reports a failure, sends a signal, shows a prompt."""
        self._forker.tick(now_s)
        if self._report_s is not None and now_s >= self._report_s:
            self._report_first_failure()
        for forwarder in self._forwarders:
            forwarder.tick(now_s)
        if self._next_signal is not None and now_s >= self._next_signal[0]:
            self._signal(self._next_signal[1])
            self._next_signal = (now_s + self._grace_s, signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM, after_s: float = 0.0) -> None:
        """Requests that all workers exit, starts no more workers, and kills those that remain after a grace period."""
        self._start_no_more()
        if self._next_signal is None or after_s == 0.0:
            self._next_signal = (time.monotonic() + after_s, number)
            self.tick(time.monotonic())

    def kill(self) -> None:
        """Kills the workers immediately, and starts no more workers."""
        self._start_no_more()
        self._signal(signal.SIGKILL)

    def interactive(self) -> WorkerProcess | None:
        """Returns the worker that is waiting for typed input, in `paceline.breakpoint` or a read, or None."""
        running = [worker for worker in self.workers if worker.exit_code is None]
        debugged = [worker for worker in running if os.path.exists(worker.debugger_file)]
        reading = [worker for worker in running if worker.reads and self._keyboard.is_read_by(worker.pid)]
        return next(iter([*debugged, *reading]), None)

    def pids(self) -> list[int]:
        """Returns the process ids of the workers that have not been reaped yet."""
        self._forker.read()  # includes workers that have just been forked
        return [worker.pid for worker in self.workers if worker.exit_code is None]

    def signal(self, number: int) -> None:
        """Sends a signal to every running worker."""
        for worker in self.workers:
            if worker.exit_code is None:
                worker.signal(number)

    def resize(self) -> None:
        """Forwards the terminal's current size to the workers that write to it."""
        for forwarder in self._forwarders:
            forwarder.resize()

    @property
    def is_over(self) -> bool:
        """Whether all workers have exited and their output was forwarded, even if their children hold pipes open."""
        if self._unstarted or self._report_s is not None or any(w.exit_code is None for w in self.workers):
            return False
        return not any(forwarder.has_more for forwarder in self._forwarders)

    def close(self) -> None:
        """Kills the workers that are still running, and closes all pipes; idempotent."""
        self._start_no_more()
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
            if worker.exit_code is None:
                self._selector.unregister(worker.pidfd)
                worker.collect()
        for forwarder in self._forwarders:
            forwarder.close()
        for recording in self.recordings.values():
            os.close(recording)
        self.recordings.clear()
        if (descriptor := self._notice.fileno()) is not None:
            self._selector.unregister(descriptor)
            self._notice.close()
        self._memory.close()
        self._keyboard.restore()

    def _on_exception_notice(self) -> None:
        self._notice.clear()
        for worker in self.workers:
            if worker.exit_code is None and worker.rank not in self.exceptions:
                record = read_record(worker.error_file)
                if record is not None:
                    failure = WorkerFailure(worker.rank, worker.pid, 1, time.time(), record, log=worker.log)
                    self.exceptions[worker.rank] = failure
                    self._on_exception(failure)

    def _ended(self, worker: WorkerProcess, code: int, output: bytes) -> None:
        if code == 0:
            return
        record = read_record(worker.error_file)
        if self._requested_s is not None and ended_as_requested(
            code, record, self._requested_s, is_first=not self.failures
        ):
            return
        failure = failure_of(worker, code, record, self._memory, output)
        failure = self._in_order(failure, worker.peak_bytes or 0)
        write_error_json(failure)
        self.failures.append(failure)
        if len(self.failures) == 1:
            self.end(after_s=CONSEQUENCES_S)
            self._report_s = time.monotonic() + _OTHERS_KILLED_S
        awaits_another = self.failures[0].memory is not None and self._memory.has_more
        if self._report_s is not None and not awaits_another:
            self._report_first_failure()

    def _in_order(self, failure: WorkerFailure, peak_bytes: int) -> WorkerFailure:
        """Corrects the time of a failure due to lack of memory, because the kernel kills the largest process first.

        The largest process takes longest to exit, so it may be reaped after smaller processes.
        """
        if failure.memory is None:
            return failure
        before_smaller = (seen_s - 0.001 for seen_s, peak in self._killed if peak < peak_bytes)
        failure = msgspec.structs.replace(failure, seen_s=min([failure.seen_s, *before_smaller]))
        self._killed.append((failure.seen_s, peak_bytes))
        return failure

    def _report_first_failure(self) -> None:
        self._report_s = None
        self._on_failure(first_failure(self.failures))

    def _signal(self, number: int) -> None:
        if self._requested_s is None:
            self._requested_s = time.time()
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped worker receives the signal now, before its program continues


def ended_as_requested(code: int, record: Record | None, requested_s: float, is_first: bool) -> bool:
    """Returns True if a worker exited with a nonzero code because of a stop request at the time of day `requested_s`.

    A worker that had already raised an exception, and was merely slow to exit, may be the cause of other failures.
    """
    if record is not None and record.time_s < requested_s and record.kind != "KeyboardInterrupt":
        return False
    return is_first or (record is None and code in (-signal.SIGTERM, -signal.SIGKILL))
