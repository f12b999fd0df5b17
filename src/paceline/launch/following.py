"""Follows one worker: passes on what it writes, and finds out how it failed."""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from paceline.launch.failures import Failure, Record, came_to_its_end
from paceline.launch.keyboard import waits_for_stdin
from paceline.launch.memory import MemoryWatch
from paceline.launch.output import Stream
from paceline.launch.pipes import Output
from paceline.launch.worker import Worker

_READ_BYTES = 1 << 16
_MOST_READS = 256
_PROMPT_S = 0.2  # after this long an unfinished line is shown to whoever should answer it


class Following:
    """Passes on what a worker writes until it has closed its streams, or `close` is called.

    Args:
        worker: who writes.
        outputs: its streams; this process's copies of what the worker writes to are closed.
        selector: its keys carry functions that the launcher's loop calls without arguments.
    """

    def __init__(self, worker: Worker, outputs: Sequence[Output], selector: selectors.BaseSelector) -> None:
        self._worker = worker
        self._selector = selector
        self._outputs = [output for output in outputs if output.stream is not None]
        self._open_pipes: dict[int, Callable[[], None]] = {}
        self._prompt_s: float | None = None  # when (monotonic) to look for a prompt
        for output in outputs:
            output.close_ours()
            if output.stream is not None:
                self._read(output.reading, output.stream)

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) `tick` must be called; None for never."""
        return self._prompt_s

    def tick(self, now_s: float) -> None:
        """Shows the prompt of a worker that waits for an answer."""
        if self._prompt_s is not None and now_s >= self._prompt_s:
            self._prompt_s = None
            if waits_for_stdin(self._worker.pid):
                for output in self._outputs:
                    if output.stream is not None:
                        output.stream.prompt()

    def resize(self) -> None:
        """Passes the terminal's current size on to the worker, if it writes to one."""
        for output in self._outputs:
            output.resize()

    @property
    def has_more(self) -> bool:
        """Whether something that was written has not been passed on."""
        return bool(self._readable())

    def drain(self) -> None:
        """Passes on what has been written so far; not all of it if somebody goes on writing."""
        for _ in range(_MOST_READS):
            if not self.has_more:
                return
            for pipe in self._readable():
                self._open_pipes[pipe]()

    def close(self) -> None:
        """Closes every pipe; idempotent."""
        for pipe in self._open_pipes:
            self._selector.unregister(pipe)
        self._open_pipes.clear()
        for output in self._outputs:
            os.close(output.reading)
            if output.stream is not None:
                output.stream.close()
        self._outputs.clear()

    def _readable(self) -> list[int]:
        waiting = select.poll()
        for pipe in self._open_pipes:
            waiting.register(pipe, select.POLLIN)
        return [pipe for pipe, _ in waiting.poll(0)] if self._open_pipes else []

    def _read(self, fd: int, stream: Stream) -> None:
        def read() -> None:
            try:
                data = os.read(fd, _READ_BYTES)
            except OSError:  # the end of a pseudo-terminal is EIO
                data = b""
            if data:
                stream.feed(data)
                if self._worker.reads:
                    self._prompt_s = time.monotonic() + _PROMPT_S
            else:
                stream.close()
                self._selector.unregister(fd)
                del self._open_pipes[fd]

        self._open_pipes[fd] = read
        self._selector.register(fd, selectors.EVENT_READ, read)


def failure_of(worker: Worker, code: int, record: Record | None, memory: MemoryWatch) -> Failure:
    """Returns how a worker failed that ended with `code` and left `record`; it may still be written to its log."""
    explained = memory.explain(worker.pid, worker.peak_bytes) if code == -signal.SIGKILL else None
    exit_code = 1 if record is not None else code  # its exception decides, also when it was slow to end
    at_exit = record is None and came_to_its_end(worker.error_file)
    return Failure(
        worker.rank, worker.pid, exit_code, time.time(), record, memory=explained, log=worker.log, at_exit=at_exit
    )
