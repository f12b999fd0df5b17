"""`LocalActivity`: the events, workers, output and stacks on this machine that the dashboard displays."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from paceline.operate.dashboard.event_queue import SENT_BY_ALL, EventFormatter, EventQueue, Fact, WorkerEnded
from paceline.operate.dashboard.job_sample import Line, Stack
from paceline.operate.diagnosis.job_snapshot import ExitReason
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.workers.output import LinePrefixer, Write

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LONGEST_LINE = 2000  # maximum length of a line shown on the dashboard, in characters
_UPDATES_S = 10.0  # interval between displayed states of a progress bar
_KEPT_NBYTES = 1 << 16  # amount of output kept for viewers that open the dashboard later


class LocalActivity:
    """The recorded events, output and workers on this machine.

    Unless `is_observed`, the latest output is only stored, at almost no cost, until `set_observed(True)` is called.
    Unless `has_all_events`, events that the launcher with the dashboard also records are left out.
    """

    def __init__(self, is_observed: bool = True, has_all_events: bool = True) -> None:
        self.notes = EventQueue()
        self.is_observed = is_observed
        self._has_all_events = has_all_events
        self._formatter = EventFormatter()
        self._host = socket.gethostname()
        self._known: dict[int, WatchedWorker] = {}
        self._kept: deque[tuple[_DashboardSink, bytes]] = deque()
        self._kept_nbytes = 0

    def note_event(self, event: str, facts: dict[str, Fact]) -> None:
        """Records a launcher event."""
        for note in self._formatter.format(event, facts, time.monotonic()):
            if self._has_all_events or note.kind not in SENT_BY_ALL:
                self.notes.leave(note)

    def watch(self, workers: Iterable[WatchedWorker]) -> None:
        """Records the workers that have started or exited since the previous call."""
        before, running = dict(self._known), {}
        for worker in workers:
            known, ending = before.pop(worker.number, None), worker.ending
            if ending is None and worker.is_running:
                running[worker.number] = worker
                if known is None or known.pid != worker.pid:
                    self.notes.leave_worker(worker.number, worker.pid, self._host, worker.recording)
            elif known is not None:
                how = "" if ending is None or ending.manner is ExitReason.FINISHED else ending.how
                self.notes.leave(WorkerEnded(known.number, known.pid, how))
        for known in before.values():  # the launcher stopped it and recorded no exit status
            self.notes.leave(WorkerEnded(known.number, known.pid, ""))
        self._known = running

    def worker_ended(self, number: int, pid: int, how: str) -> None:
        """Records a worker's exit. `how` describes the failure, and is "" if the worker did not fail."""
        self._known.pop(number, None)
        self.notes.leave(WorkerEnded(number, pid, how))

    def forget_workers(self) -> None:
        """Causes the next `watch` to record all running workers again."""
        self._known = {}

    def take_stacks(self) -> int:
        """Captures the stacks of the running workers, which may take seconds; returns the number of workers."""
        from paceline.operate.diagnosis.worker_process import capture_stack

        workers = list(self._known.values())
        for worker in workers:
            frames = capture_stack(worker.pid)
            text = "\n".join(f"{frame.file}:{frame.line} in {frame.function}" for frame in frames)
            self.notes.leave(Stack(worker.number, time.monotonic(), text or "it does not answer"))
        return len(workers)

    def start_stack_capture(self) -> None:
        """Captures the stacks on a separate thread."""
        threading.Thread(target=self.take_stacks, name="paceline-stacks", daemon=True).start()

    def sink(self, number: int, stream: int) -> _DashboardSink:
        """Returns the sink for a worker's output stream."""

        def write(data: bytes) -> None:
            now_s = time.monotonic()
            for line in data.splitlines():
                text = _ESCAPES.sub(b"", line).decode(errors="replace")[:_LONGEST_LINE]
                self.notes.leave(Line(now_s, number, stream, text))

        return _DashboardSink(self, write)

    def set_observed(self, is_on: bool) -> None:
        """Starts or stops processing output as it arrives."""
        self.is_observed = is_on
        while is_on and self._kept:
            sink, data = self._kept.popleft()
            sink.feed(data)
        self._kept_nbytes = 0 if is_on else self._kept_nbytes

    def keep(self, sink: _DashboardSink, data: bytes) -> None:
        """Stores output for later."""
        self._kept.append((sink, data))
        self._kept_nbytes += len(data)
        while self._kept_nbytes > _KEPT_NBYTES and len(self._kept) > 1:
            self._kept_nbytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        """Releases the resources held by queued notes; idempotent."""
        self.notes.close()


class _DashboardSink(LinePrefixer):
    def __init__(self, activity: LocalActivity, write: Write) -> None:
        super().__init__(b"", write, _UPDATES_S)
        self._activity = activity

    def feed(self, data: bytes) -> None:
        """Accepts output, which may be split at any byte."""
        if self._activity.is_observed:
            super().feed(data)
        else:
            self._activity.keep(self, data)
