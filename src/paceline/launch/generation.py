"""Watches the workers of one generation on this machine until the last of them has ended."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable

from paceline.launch.failures import Failure, came_to_its_end, keep, read_record
from paceline.launch.keyboard import Keyboard, waits_for_stdin
from paceline.launch.memory import MemoryWatch
from paceline.launch.output import Stream
from paceline.launch.pipes import Output
from paceline.launch.worker import Worker

CONSEQUENCES_S = 0.5  # how long after a failure the ranks that end because of it have to report that themselves
_READ_BYTES = 1 << 16
_PROMPT_S = 0.2  # after this long an unfinished line is shown to whoever should answer it


class Generation:
    """The workers of generation `number`; `start_workers` makes it. It ends when `is_over` says so.

    Args:
        number: counts the generations of the job from 1.
        shutdown_timeout_s: how long workers that are asked to end have until SIGKILL.
        keyboard: the launcher's stdin, which one of the workers may read.
        selector: its keys carry functions that the launcher's loop calls without arguments.
        on_failure: is called with the first failure.
    """

    def __init__(
        self,
        number: int,
        shutdown_timeout_s: float,
        keyboard: Keyboard,
        selector: selectors.BaseSelector,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.number = number
        self.failures: list[Failure] = []
        self.workers: list[Worker] = []
        self._selector = selector
        self._on_failure = on_failure
        self._keyboard = keyboard
        self._streams: list[Stream] = []
        self._outputs: list[Output] = []
        self._prompting: list[Stream] = []  # those of the worker that reads stdin
        self._open_pipes: set[int] = set()
        self._memory = MemoryWatch()
        self._grace_s = shutdown_timeout_s
        self._next_signal: tuple[float, int] | None = None  # when (monotonic) the workers get which signal
        self._prompt_s: float | None = None  # when (monotonic) to look for one
        self._was_asked_to_end = False

    def follow(self, worker: Worker, outputs: list[Output]) -> None:
        """Watches a worker that has just been started: passes on its output, and notices its end."""
        self.workers.append(worker)
        for output in outputs:
            output.close_ours()
            if output.stream is not None:
                worker.pipes.append(output.reading)
                self._streams.append(output.stream)
                self._outputs.append(output)
                if worker.reads:
                    self._prompting.append(output.stream)
                self._read(output.reading, output.stream, worker.reads)

        def ended() -> None:
            self._selector.unregister(worker.pidfd)
            self._ended(worker, worker.collect())

        self._selector.register(worker.pidfd, selectors.EVENT_READ, ended)

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) `tick` must be called; None for never."""
        signal_s = self._next_signal[0] if self._next_signal is not None else None
        return min((each for each in (signal_s, self._prompt_s) if each is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Sends the signal that is due at `now_s`, and shows the prompt of a worker that waits for an answer."""
        if self._prompt_s is not None and now_s >= self._prompt_s:
            self._prompt_s = None
            if any(worker.reads and waits_for_stdin(worker.pid) for worker in self.workers):
                for stream in self._prompting:
                    stream.prompt()
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

    def interactive(self) -> Worker | None:
        """Returns the worker that waits for typed input: it is in `paceline.breakpoint`, or reads the terminal."""
        running = [worker for worker in self.workers if worker.exit_code is None]
        debugged = [worker for worker in running if os.path.exists(worker.debugger_file)]
        reading = [worker for worker in running if worker.reads and self._keyboard.is_read_by(worker.pid)]
        return next(iter([*debugged, *reading]), None)

    def signal(self, number: int) -> None:
        """Sends a signal to every running worker."""
        for worker in self.workers:
            if worker.exit_code is None:
                worker.signal(number)

    def resize(self) -> None:
        """Passes the terminal's current size on to the workers that write to it."""
        for output in self._outputs:
            output.resize()

    @property
    def is_over(self) -> bool:
        """Whether every worker has ended and its output is passed on; pipes held open by its children do not count."""
        if any(worker.exit_code is None for worker in self.workers):
            return False
        ready = self._selector.select(0)
        return not any(key.fd in self._open_pipes for key, _ in ready)

    def close(self) -> None:
        """Kills what still runs and closes every pipe; idempotent."""
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
            if worker.exit_code is None:
                self._selector.unregister(worker.pidfd)
                worker.collect()
            for pipe in worker.pipes:
                if pipe in self._open_pipes:
                    self._selector.unregister(pipe)
                    self._open_pipes.discard(pipe)
                os.close(pipe)
            worker.pipes.clear()
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._outputs.clear()
        self._keyboard.restore()

    def _read(self, fd: int, stream: Stream, may_prompt: bool) -> None:
        def read() -> None:
            try:
                data = os.read(fd, _READ_BYTES)
            except OSError:  # the end of a pseudo-terminal is EIO
                data = b""
            if data:
                stream.feed(data)
                if may_prompt:
                    self._prompt_s = time.monotonic() + _PROMPT_S
            else:
                stream.close()
                self._selector.unregister(fd)
                self._open_pipes.discard(fd)

        self._open_pipes.add(fd)
        self._selector.register(fd, selectors.EVENT_READ, read)

    def _ended(self, worker: Worker, code: int) -> None:
        if code == 0:
            return
        record = read_record(worker.error_file)
        if self._was_asked_to_end and (
            not self.failures or (record is None and code in (-signal.SIGTERM, -signal.SIGKILL))
        ):
            return  # it ended because it was asked to
        memory = self._memory.explain(worker.pid, worker.peak_bytes) if code == -signal.SIGKILL else None
        exit_code = 1 if record is not None else code  # its exception decides, also when it was slow to end
        at_exit = record is None and came_to_its_end(worker.error_file)
        failure = Failure(
            worker.rank, worker.pid, exit_code, time.time(), record, memory=memory, log=worker.log, at_exit=at_exit
        )
        keep(failure)
        self.failures.append(failure)
        if len(self.failures) == 1:
            self.end(after_s=CONSEQUENCES_S)
            self._on_failure(failure)

    def _signal(self, number: int) -> None:
        self._was_asked_to_end = True
        self.signal(signal.SIGCONT)  # a stopped worker would not hear it
        self.signal(number)
