"""Connection from a launcher to the dashboard, which is served by this launcher or by a launcher on another machine.

Each launcher records the activity on its own machine: events, workers, output and stacks.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.operate.dashboard.event_queue import TOLD_BY_ALL, EventFormatter, EventQueue, Fact, WorkerGone
from paceline.operate.dashboard.job_sample import Line, Stack
from paceline.operate.diagnosis.job_snapshot import ExitReason
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.job import Job
from paceline.operate.launch.multinode.node_connection import NodeConnection
from paceline.operate.launch.multinode.protocol import UserMessage
from paceline.operate.launch.workers.output import LinePrefixer

if TYPE_CHECKING:
    from paceline.operate.launch.job_dashboard import JobDashboard, RemoteDashboardFeed


_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LONGEST_LINE = 2000  # maximum length of a line shown on the dashboard, in characters
_UPDATES_S = 10.0  # interval between displayed states of a progress bar
_KEPT_NBYTES = 1 << 16  # amount of output kept for viewers that open the dashboard later


class DashboardLink:
    """The dashboard if this launcher serves it, otherwise a feed to the launcher that serves the dashboard.

    Args:
        job: The job, whose options specify whether there is a dashboard.
        connection: The connection to the rendezvous. The launcher that hosts the rendezvous also serves the dashboard.
        is_secret: Whether the job has a secret.
        directory: The job's directory, or None.
        say: A function that prints a line for the user.
        workers: A function that returns the running workers on this machine.

    Attributes:
        local: The recorded activity on this machine, or None if the job cannot have a dashboard.
    """

    def __init__(
        self,
        job: Job,
        connection: NodeConnection,
        is_secret: bool,
        directory: Path | None,
        say: Callable[[str], None],
        workers: Callable[[], Iterable[WatchedWorker]],
    ) -> None:
        self._connection = connection
        self._workers = workers
        self._page: JobDashboard | None = None
        self._feed: RemoteDashboardFeed | None = None
        self.local: LocalActivity | None = None
        if connection.serves:
            if job.page is not None:
                from paceline.operate.launch.job_dashboard import JobDashboard

                self.local = LocalActivity()
                security = "auth" if is_secret else ""
                self._page = JobDashboard(job, security, directory, say, connection.client.send, self.local)
        else:
            self.local = LocalActivity(is_observed=False, has_all_events=False)

    @property
    def has_page(self) -> bool:
        """Whether this launcher serves the dashboard."""
        return self._page is not None

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `tick` must be called; None for never."""
        return next((source.deadline_s for source in (self._page, self._feed) if source is not None), None)

    def tick(self, now_s: float) -> None:
        """Samples the workers if a sample is due."""
        if self._page is not None:
            self._page.watch(now_s, self._workers)
        elif self._feed is not None:
            self._feed.tick(now_s)

    def generation(self, world_size: int, restarts: int) -> None:
        """Displays the start or restart of workers."""
        if self._page is not None:
            self._page.generation(world_size, restarts)

    def seen(self, body: str) -> None:
        """Displays an update from another machine's launcher."""
        if self._page is not None:
            self._page.seen(body)

    def stalled(self, message: UserMessage) -> None:
        """Displays the cause of a stall."""
        if self._page is not None:
            self._page.stalled(message)

    def take_stacks(self) -> None:
        """Starts capturing the stacks of this machine's workers."""
        if self.local is not None:
            self.local.start_stack_capture()

    def send_to_dashboard(self, is_on: bool) -> None:
        """Starts or stops the feed to the launcher that serves the dashboard."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if is_on and self.local is not None:
            from paceline.operate.launch.job_dashboard import RemoteDashboardFeed

            self._feed = RemoteDashboardFeed(self.local, self._workers, self._offset_s, self._connection.client.send)

    def record_exits(self) -> None:
        """Records the exits of workers. Must be called before the launcher reports the exits and closes the recordings.

        `workers` must still return these workers.
        """
        if self._page is not None:
            self._page.local.watch(self._workers())
        elif self._feed is not None:
            self._feed.send_sample()

    def worker_ended(self, number: int, pid: int, how: str) -> None:
        """Records the exit of a worker that `workers` no longer returns, before the launcher reports the exit.

        Args:
            number: The worker's number in the job.
            pid: The worker's process id.
            how: A description of the worker's failure, or "" if the worker succeeded or was asked to exit.
        """
        if self.local is not None:
            self.local.worker_ended(number, pid, how)
        if self._feed is not None:
            self._feed.send_sample()

    def over(self, outcome: str) -> None:
        """Displays the job's outcome."""
        if self._page is not None:
            self._page.over(outcome)

    def close(self) -> None:
        """Closes the dashboard or the feed; idempotent."""
        for resource in (self._page, self._feed, self.local):
            if resource is not None:
                resource.close()

    def _offset_s(self) -> float:
        offset = self._connection.client.clock_offset()
        return offset.offset_ns / 1e9 if offset is not None else 0.0


class LocalActivity:
    """The recorded events, output and workers on this machine.

    Args:
        is_observed: Whether to process output as it arrives. If not, the latest output is stored at almost no cost
            until `set_observed(True)`.
        has_all_events: Whether to include events that the launcher with the dashboard also records.
    """

    def __init__(self, is_observed: bool = True, has_all_events: bool = True) -> None:
        self.notes = EventQueue()
        self._is_observed = is_observed
        self._has_all_events = has_all_events
        self._formatter = EventFormatter()
        self._host = socket.gethostname()
        self._known: dict[int, WatchedWorker] = {}
        self._kept: deque[tuple[LinePrefixer, bytes]] = deque()
        self._kept_nbytes = 0

    def note_event(self, event: str, facts: dict[str, Fact]) -> None:
        """Records a launcher event."""
        for note in self._formatter.tell(event, facts, time.monotonic()):
            if self._has_all_events or note.kind not in TOLD_BY_ALL:
                self.notes.leave(note)

    def watch(self, workers: Iterable[WatchedWorker]) -> None:
        """Records the workers that have started or exited since the previous call."""
        running = {}
        for worker in workers:
            ending = worker.ending
            if ending is not None or not worker.is_running:
                is_failure = ending is not None and ending.manner is not ExitReason.FINISHED
                self._ended(worker.number, ending.how if ending is not None and is_failure else "")
                continue
            running[worker.number] = worker
            known = self._known.get(worker.number)
            if known is None or known.pid != worker.pid:
                self.notes.leave_worker(worker.number, worker.pid, self._host, worker.recording)
        for number in set(self._known) - set(running):  # the launcher stopped it and recorded no exit status
            self._ended(number, "")
        self._known = running

    def worker_ended(self, number: int, pid: int, how: str) -> None:
        """Records a worker's exit. `how` describes the failure, and is "" if the worker did not fail."""
        self._known.pop(number, None)
        self.notes.leave(WorkerGone(number, pid, how))

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

        return _DashboardSink(self, LinePrefixer(b"", write, _UPDATES_S))

    def set_observed(self, is_on: bool) -> None:
        """Starts or stops processing output as it arrives."""
        self._is_observed = is_on
        while is_on and self._kept:
            lines, data = self._kept.popleft()
            lines.feed(data)
        self._kept_nbytes = 0 if is_on else self._kept_nbytes

    def feed_lines(self, lines: LinePrefixer, data: bytes) -> None:
        """Processes output or stores it for later."""
        if self._is_observed:
            lines.feed(data)
            return
        self._kept.append((lines, data))
        self._kept_nbytes += len(data)
        while self._kept_nbytes > _KEPT_NBYTES and len(self._kept) > 1:
            self._kept_nbytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        """Releases the resources held by queued notes; idempotent."""
        self.notes.close()

    def _ended(self, number: int, how: str) -> None:
        known = self._known.pop(number, None)
        if known is not None:
            self.notes.leave(WorkerGone(number, known.pid, how))


class _DashboardSink:
    """Sink for one output stream."""

    def __init__(self, notes: LocalActivity, lines: LinePrefixer) -> None:
        self._notes = notes
        self._lines = lines

    def feed(self, data: bytes) -> None:
        """Accepts output, which may be split at any byte."""
        self._notes.feed_lines(self._lines, data)

    def prompt(self) -> None:
        """Shows the unfinished line."""
        self._lines.prompt()

    def close(self) -> None:
        """Flushes the remaining output."""
        self._lines.close()
