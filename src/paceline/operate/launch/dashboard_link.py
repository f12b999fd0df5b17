"""What a launcher shows of its workers: on the live page that it has, or to the launcher that has one.

What a launcher notes of its own machine for the live page, whether it serves the page or another one does.
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
_LONGEST_LINE = 2000  # characters of a line that the page shows
_UPDATES_S = 10.0  # between two states of a progress bar
_KEPT_NBYTES = 1 << 16  # of output, for somebody who begins to look


class LocalActivity:
    """Notes the events, the output and the workers of this machine.

    Args:
        is_observed: whether the output is read as it comes. Otherwise the latest of it is kept until `hear`, which costs
            next to nothing.
        has_all_events: whether events are noted that the launcher of the page notes, too.
    """

    def __init__(self, is_observed: bool = True, has_all_events: bool = True) -> None:
        self.notes = EventQueue()
        self._is_heard = is_observed
        self._has_all_events = has_all_events
        self._story = EventFormatter()
        self._host = socket.gethostname()
        self._known: dict[int, WatchedWorker] = {}
        self._kept: deque[tuple[LinePrefixer, bytes]] = deque()
        self._kept_nbytes = 0

    def happened(self, event: str, facts: dict[str, Fact]) -> None:
        """Notes an event of the launcher's."""
        for told in self._story.tell(event, facts, time.monotonic()):
            if self._has_all_events or told.kind not in TOLD_BY_ALL:
                self.notes.leave(told)

    def watch(self, workers: Iterable[WatchedWorker]) -> None:
        """Notes which of the workers have begun and which have ended since the last call."""
        running = {}
        for worker in workers:
            if worker.ending is not None:
                self._ended(worker.number, worker.ending.how if worker.ending.manner is not ExitReason.FINISHED else "")
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
        from paceline.operate.diagnosis.worker_process import capture_stack

        workers = list(self._known.values())
        for worker in workers:
            frames = capture_stack(worker.pid)
            text = "\n".join(f"{frame.file}:{frame.line} in {frame.function}" for frame in frames)
            self.notes.leave(Stack(worker.number, time.monotonic(), text or "it gives no answer"))
        return len(workers)

    def start_stack_capture(self) -> None:
        """Takes the stacks in a thread of their own."""
        threading.Thread(target=self.take_stacks, name="paceline-stacks", daemon=True).start()

    def sink(self, number: int, stream: int) -> _OutputTap:
        """Returns what takes in the output of a worker's stream."""

        def write(data: bytes) -> None:
            now_s = time.monotonic()
            for line in data.splitlines():
                text = _ESCAPES.sub(b"", line).decode(errors="replace")[:_LONGEST_LINE]
                self.notes.leave(Line(now_s, number, stream, text))

        return _OutputTap(self, LinePrefixer(b"", write, _UPDATES_S))

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
            self.notes.leave(WorkerGone(number, known.pid, how))


class _OutputTap:
    """Takes in the output of one stream."""

    def __init__(self, notes: LocalActivity, lines: LinePrefixer) -> None:
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


class DashboardLink:
    """The page, if this launcher has it; otherwise what it notes for the page of another machine's launcher.

    Args:
        job: says whether there is a page.
        connection: this launcher's connection to the meeting; whoever serves that has the page.
        is_secret: the page asks who looks.
        directory: the job's directory, if there is one.
        say: tells the user where the page is.
        workers: returns those of this machine that run.

    Attributes:
        local: what is noted here; None without any page to come.
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
        self._outlook: RemoteDashboardFeed | None = None
        self.local: LocalActivity | None = None
        if connection.serves:
            if job.page is not None:
                from paceline.operate.launch.job_dashboard import JobDashboard

                self._page = JobDashboard(job, "auth" if is_secret else "", directory, say, connection.client.send)
                self.local = self._page.local
        else:
            self.local = LocalActivity(is_observed=False, has_all_events=False)

    @property
    def has_page(self) -> bool:
        """Whether the page is here."""
        return self._page is not None

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) `tick` must be called; None for never."""
        return next((each.deadline_s for each in (self._page, self._outlook) if each is not None), None)

    def tick(self, now_s: float) -> None:
        """Looks at the workers, if that is due."""
        if self._page is not None:
            self._page.watch(now_s, self._workers)
        elif self._outlook is not None:
            self._outlook.tick(now_s)

    def generation(self, world_size: int, restarts: int) -> None:
        """Shows that the workers begin, or begin again."""
        if self._page is not None:
            self._page.generation(world_size, restarts)

    def seen(self, body: str) -> None:
        """Shows what another machine's launcher has seen."""
        if self._page is not None:
            self._page.seen(body)

    def stalled(self, told: UserMessage) -> None:
        """Shows why the job makes no progress."""
        if self._page is not None:
            self._page.stalled(told)

    def take_stacks(self) -> None:
        """Begins to take the stacks of this machine's workers for the page."""
        if self.local is not None:
            self.local.start_stack_capture()

    def send_to_dashboard(self, is_on: bool) -> None:
        """Begins or ends to tell the launcher that has the page what this machine's workers do."""
        if self._outlook is not None:
            self._outlook.close()
            self._outlook = None
        if is_on and self.local is not None:
            from paceline.operate.launch.job_dashboard import RemoteDashboardFeed

            self._outlook = RemoteDashboardFeed(self.local, self._workers, self._offset_s, self._connection.client.send)

    def send_last_update(self) -> None:
        """Tells the launcher that has the page what the workers did last, before it learns that they have ended.

        It must be called while they are still known.
        """
        if self._outlook is not None:
            self._outlook.look()

    def over(self, outcome: str) -> None:
        """Shows how the job has ended."""
        if self._page is not None:
            self._page.over(outcome)

    def close(self) -> None:
        """Ends all of this; idempotent."""
        for each in (self._page, self._outlook, self.local):
            if each is not None:
                each.close()

    def _offset_s(self) -> float:
        offset = self._connection.client.clock_offset()
        return offset.offset_ns / 1e9 if offset is not None else 0.0
