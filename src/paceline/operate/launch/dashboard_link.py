"""Connection from a launcher to the dashboard, which is served by this launcher or by one on another machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.job import Job
from paceline.operate.launch.local_activity import LocalActivity
from paceline.operate.launch.multinode.node_connection import NodeConnection
from paceline.operate.launch.multinode.protocol import UserMessage

if TYPE_CHECKING:
    from paceline.operate.launch.job_dashboard import JobDashboard, RemoteDashboardFeed


class DashboardLink:
    """The dashboard if this launcher serves it, otherwise a feed to the launcher that serves the dashboard.

    The launcher that hosts the rendezvous also serves the dashboard. `local`, the recorded activity on this machine, is
    None if the job cannot have a dashboard.
    """

    def __init__(
        self,
        job: Job,
        connection: NodeConnection,
        is_secret: bool,
        directory: Path | None,
        print_line: Callable[[str], None],
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
                self._page = JobDashboard(
                    job, security, directory, print_line, connection.client.send, self.local, workers
                )
        else:
            self.local = LocalActivity(is_observed=False, has_all_events=False)

    @property
    def has_page(self) -> bool:
        """Whether this launcher serves the dashboard."""
        return self._page is not None

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `tick` must be called; None for never."""
        return self._output.deadline_s if self._output is not None else None

    @property
    def _output(self) -> JobDashboard | RemoteDashboardFeed | None:
        return self._feed if self._page is None else self._page

    def tick(self, now_s: float) -> None:
        """Samples the workers if a sample is due."""
        if self._output is not None:
            self._output.tick(now_s)

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
        """Records the exits of workers that `workers` still returns, before the launcher reports the exits."""
        if self._output is not None:
            self._output.sample()

    def worker_ended(self, number: int, pid: int, how: str) -> None:
        """Records the exit of a worker that `workers` no longer returns, before the launcher reports it.

        `how` describes the worker's failure, and is "" if the worker succeeded or was asked to exit.
        """
        if self.local is not None:
            self.local.worker_ended(number, pid, how)
        if self._feed is not None:
            self._feed.sample()

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
