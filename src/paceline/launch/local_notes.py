"""What a launcher notes of its own machine for the live page, whether it serves the page or another one does."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from paceline.launch.output import LinePrefixer
from paceline.observe.evidence import Manner
from paceline.observe.live.notes import Notes, WorkerEnded
from paceline.observe.live.sample import Line, Stack
from paceline.observe.live.story import TOLD_BY_ALL, Fact, Story
from paceline.observe.watching import Watched

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LONGEST_LINE = 2000  # characters of a line that the page shows
_UPDATES_S = 10.0  # between two states of a progress bar
_KEPT_NBYTES = 1 << 16  # of output, for somebody who begins to look


class LocalNotes:
    """Notes the events, the output and the workers of this machine.

    Args:
        is_heard: whether the output is read as it comes. Otherwise the latest of it is kept until `hear`, which costs
            next to nothing.
        has_all_events: whether events are noted that the launcher of the page notes, too.
    """

    def __init__(self, is_heard: bool = True, has_all_events: bool = True) -> None:
        self.notes = Notes()
        self._is_heard = is_heard
        self._has_all_events = has_all_events
        self._story = Story()
        self._host = socket.gethostname()
        self._known: dict[int, Watched] = {}
        self._kept: deque[tuple[LinePrefixer, bytes]] = deque()
        self._kept_nbytes = 0

    def happened(self, event: str, facts: dict[str, Fact]) -> None:
        """Notes an event of the launcher's."""
        for told in self._story.tell(event, facts, time.monotonic()):
            if self._has_all_events or told.kind not in TOLD_BY_ALL:
                self.notes.leave(told)

    def watch(self, workers: Iterable[Watched]) -> None:
        """Notes which of the workers have begun and which have ended since the last call."""
        running = {}
        for worker in workers:
            if worker.ending is not None:
                self._ended(worker.number, worker.ending.how if worker.ending.manner is not Manner.FINISHED else "")
                continue
            running[worker.number] = worker
            known = self._known.get(worker.number)
            if known is None or known.pid != worker.pid:
                self.notes.leave_worker(worker.number, worker.pid, self._host, worker.recording)
        for number in set(self._known) - set(running):
            self._ended(number, "has ended")
        self._known = running

    def forget_workers(self) -> None:
        """Makes the next `watch` note all workers that run."""
        self._known = {}

    def take_stacks(self) -> int:
        """Takes the stacks of the workers that run, and returns how many they are; it may take seconds."""
        from paceline.observe.taking import take

        workers = list(self._known.values())
        for worker in workers:
            frames = take(worker.pid)
            text = "\n".join(f"{frame.file}:{frame.line} in {frame.function}" for frame in frames)
            self.notes.leave(Stack(worker.number, time.monotonic(), text or "it gives no answer"))
        return len(workers)

    def begin_to_take_stacks(self) -> None:
        """Takes the stacks in a thread of their own."""
        threading.Thread(target=self.take_stacks, name="paceline-stacks", daemon=True).start()

    def sink(self, number: int, stream: int) -> _Ear:
        """Returns what takes in the output of a worker's stream."""

        def write(data: bytes) -> None:
            now_s = time.monotonic()
            for line in data.splitlines():
                text = _ESCAPES.sub(b"", line).decode(errors="replace")[:_LONGEST_LINE]
                self.notes.leave(Line(now_s, number, stream, text))

        return _Ear(self, LinePrefixer(b"", write, _UPDATES_S))

    def hear(self, is_on: bool) -> None:
        """Begins or ends to read the output."""
        self._is_heard = is_on
        while is_on and self._kept:
            lines, data = self._kept.popleft()
            lines.feed(data)
        self._kept_nbytes = 0 if is_on else self._kept_nbytes

    def took(self, lines: LinePrefixer, data: bytes) -> None:
        """Takes in output, or keeps it for later."""
        if self._is_heard:
            lines.feed(data)
            return
        self._kept.append((lines, data))
        self._kept_nbytes += len(data)
        while self._kept_nbytes > _KEPT_NBYTES and len(self._kept) > 1:
            self._kept_nbytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        """Releases what the notes hold; idempotent."""
        self.notes.close()

    def _ended(self, number: int, how: str) -> None:
        known = self._known.pop(number, None)
        if known is not None:
            self.notes.leave(WorkerEnded(number, known.pid, how))


class _Ear:
    """Takes in the output of one stream."""

    def __init__(self, notes: LocalNotes, lines: LinePrefixer) -> None:
        self._notes = notes
        self._lines = lines

    def feed(self, data: bytes) -> None:
        """Takes more output, cut anywhere."""
        self._notes.took(self._lines, data)

    def prompt(self) -> None:
        """Shows the unfinished line."""
        self._lines.prompt()

    def close(self) -> None:
        """Passes on what is left."""
        self._lines.close()
