"""Watches the workers of one generation on this machine until the last of them has ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable

import msgspec

from paceline.operate.launch.workers.failures import (
    ExceptionNotice,
    Record,
    WorkerFailure,
    first_failure,
    read_record,
    write_error_json,
)
from paceline.operate.launch.workers.job_control import Keyboard
from paceline.operate.launch.workers.out_of_memory import MemoryWatch
from paceline.operate.launch.workers.output import WorkerOutput
from paceline.operate.launch.workers.worker import OutputForwarder, WorkerProcess, failure_of

CONSEQUENCES_S = 0.5  # how long after a failure the ranks that end because of it have to report that themselves
_OTHERS_KILLED_S = 0.3  # for the end of another worker that the kernel has killed too, since memory ran out


class WorkerGroup:
    """The workers of generation `number`; `start_workers` makes it. It ends when `is_over` says so.

    Args:
        number: counts the generations of the job from 1.
        shutdown_timeout_s: how long workers that are asked to end have until SIGKILL.
        keyboard: the launcher's stdin, which one of the workers may read.
        selector: its keys carry functions that the launcher's loop calls without arguments.
        alarm: rings when an exception has left a worker's script.
        on_exception: is called with such a failure, before the worker has ended.
        on_failure: is called with the first failure of a worker that has ended; a moment later if memory ran out and
            the kernel has killed another one too, which may be the one that took it.
    """

    def __init__(
        self,
        number: int,
        shutdown_timeout_s: float,
        keyboard: Keyboard,
        selector: selectors.BaseSelector,
        alarm: ExceptionNotice,
        on_exception: Callable[[WorkerFailure], None],
        on_failure: Callable[[WorkerFailure], None],
    ) -> None:
        self.number = number
        self.failures: list[WorkerFailure] = []
        self.exceptions: dict[int, WorkerFailure] = {}  # by rank, of workers that had not ended when it was told
        self.workers: list[WorkerProcess] = []
        self.recordings: dict[
            int, int
        ] = {}  # by rank, descriptors of what the workers record, also of those that ended
        self._selector = selector
        self._on_exception = on_exception
        self._on_failure = on_failure
        self._alarm = alarm
        if (bell := alarm.fileno()) is not None:
            selector.register(bell, selectors.EVENT_READ, self._on_exception_notice)
        self._keyboard = keyboard
        self._followings: list[OutputForwarder] = []
        self._memory = MemoryWatch()
        self._killed: list[tuple[float, int]] = []  # by the kernel for their memory: when, and the most they used
        self._grace_s = shutdown_timeout_s
        self._next_signal: tuple[float, int] | None = None  # when (monotonic) the workers get which signal
        self._asked_s: float | None = None  # at what time of day the workers were asked to end
        self._told_s: float | None = None  # when (monotonic) the first failure is told, if that waits for another one

    def follow(self, worker: WorkerProcess, outputs: list[WorkerOutput]) -> None:
        """Watches a worker that has just been started: passes on its output, and notices its end."""
        self.workers.append(worker)
        if worker.memory is not None:
            with contextlib.suppress(OSError):  # there are no more descriptors
                self.recordings[worker.rank] = os.dup(worker.memory.fd)
        self._followings.append(OutputForwarder(worker, outputs, self._selector))

        def ended() -> None:
            self._selector.unregister(worker.pidfd)
            self._ended(worker, worker.collect())

        self._selector.register(worker.pidfd, selectors.EVENT_READ, ended)

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) `tick` must be called; None for never."""
        signal_s = self._next_signal[0] if self._next_signal is not None else None
        times_s = [signal_s, self._told_s, *(following.deadline_s for following in self._followings)]
        return min((each for each in times_s if each is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Does what is due at `now_s`: tells a failure, sends a signal, shows the prompt of a worker that asks."""
        if self._told_s is not None and now_s >= self._told_s:
            self._report_first_failure()
        for following in self._followings:
            following.tick(now_s)
        if self._next_signal is not None and now_s >= self._next_signal[0]:
            self._signal(self._next_signal[1])
            self._next_signal = (now_s + self._grace_s, signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM, after_s: float = 0.0) -> None:
        """Asks the workers to end; kills those that still run after the grace period."""
        if self._next_signal is None or after_s == 0.0:
            self._next_signal = (time.monotonic() + after_s, number)
            self.tick(time.monotonic())

    def kill(self) -> None:
        """Kills the workers at once."""
        self._signal(signal.SIGKILL)

    def interactive(self) -> WorkerProcess | None:
        """Returns the worker that waits for typed input: it is in `paceline.breakpoint`, or reads the terminal."""
        running = [worker for worker in self.workers if worker.exit_code is None]
        debugged = [worker for worker in running if os.path.exists(worker.debugger_file)]
        reading = [worker for worker in running if worker.reads and self._keyboard.is_read_by(worker.pid)]
        return next(iter([*debugged, *reading]), None)

    def pids(self) -> list[int]:
        """Returns the process ids of the workers whose end is not known yet."""
        return [worker.pid for worker in self.workers if worker.exit_code is None]

    def signal(self, number: int) -> None:
        """Sends a signal to every running worker."""
        for worker in self.workers:
            if worker.exit_code is None:
                worker.signal(number)

    def resize(self) -> None:
        """Passes the terminal's current size on to the workers that write to it."""
        for following in self._followings:
            following.resize()

    @property
    def is_over(self) -> bool:
        """Whether every worker has ended and its output is passed on; pipes held open by its children do not count."""
        if self._told_s is not None or any(worker.exit_code is None for worker in self.workers):
            return False
        return not any(following.has_more for following in self._followings)

    def close(self) -> None:
        """Kills what still runs and closes every pipe; idempotent."""
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
            if worker.exit_code is None:
                self._selector.unregister(worker.pidfd)
                worker.collect()
        for following in self._followings:
            following.close()
        for recording in self.recordings.values():
            os.close(recording)
        self.recordings.clear()
        if (bell := self._alarm.fileno()) is not None:
            self._selector.unregister(bell)
            self._alarm.close()
        self._memory.close()
        self._keyboard.restore()

    def _on_exception_notice(self) -> None:
        self._alarm.quiet()
        for worker in self.workers:
            if worker.exit_code is None and worker.rank not in self.exceptions:
                record = read_record(worker.error_file)
                if record is not None:
                    failure = WorkerFailure(worker.rank, worker.pid, 1, time.time(), record, log=worker.log)
                    self.exceptions[worker.rank] = failure
                    self._on_exception(failure)

    def _ended(self, worker: WorkerProcess, code: int) -> None:
        if code == 0:
            return
        record = read_record(worker.error_file)
        if self._asked_s is not None and ended_as_asked(code, record, self._asked_s, is_first=not self.failures):
            return
        failure = self._in_order(failure_of(worker, code, record, self._memory), worker.peak_bytes or 0)
        write_error_json(failure)
        self.failures.append(failure)
        if len(self.failures) == 1:
            self.end(after_s=CONSEQUENCES_S)
            self._told_s = time.monotonic() + _OTHERS_KILLED_S
        awaits_another = self.failures[0].memory is not None and self._memory.has_more
        if self._told_s is not None and not awaits_another:
            self._report_first_failure()

    def _in_order(self, failure: WorkerFailure, peak_bytes: int) -> WorkerFailure:
        """Returns the failure as of the moment when the kernel killed the worker, if it did since memory ran out.

        The kernel kills the largest process first, and its end takes longest.
        """
        if failure.memory is None:
            return failure
        smaller = [seen_s for seen_s, peak in self._killed if peak < peak_bytes]
        failure = msgspec.structs.replace(failure, seen_s=min([failure.seen_s, *(each - 0.001 for each in smaller)]))
        self._killed.append((failure.seen_s, peak_bytes))
        return failure

    def _report_first_failure(self) -> None:
        self._told_s = None
        self._on_failure(first_failure(self.failures))

    def _signal(self, number: int) -> None:
        if self._asked_s is None:
            self._asked_s = time.time()
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped worker hears it now, before anything else of its program runs


def ended_as_asked(code: int, record: Record | None, asked_s: float, is_first: bool) -> bool:
    """Returns whether a worker that did not end well ended because it was asked to.

    One that had raised an exception before, and was only slow to end, may be the cause of what went wrong elsewhere.

    Args:
        code: its exit code.
        record: the exception that it left.
        asked_s: at what time of day it was asked to end.
        is_first: whether no worker of this machine had failed before it.
    """
    if record is not None and record.time_s < asked_s and record.kind != "KeyboardInterrupt":
        return False
    return is_first or (record is None and code in (-signal.SIGTERM, -signal.SIGKILL))
