"""What a launcher shows of its workers: on the live page that it has, or to the launcher that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.launch.job import Job
from paceline.launch.local_notes import LocalNotes
from paceline.launch.nodes.meeting import NodeConnection
from paceline.launch.nodes.messages import Told
from paceline.observe.watching import Watched

if TYPE_CHECKING:
    from paceline.launch.outlook import Outlook
    from paceline.launch.page import Page


class Showing:
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
        workers: Callable[[], Iterable[Watched]],
    ) -> None:
        self._connection = connection
        self._workers = workers
        self._page: Page | None = None
        self._outlook: Outlook | None = None
        self.local: LocalNotes | None = None
        if connection.serves:
            if job.page is not None:
                from paceline.launch.page import Page

                self._page = Page(job, "auth" if is_secret else "", directory, say, connection.client.send)
                self.local = self._page.local
        else:
            self.local = LocalNotes(is_heard=False, has_all_events=False)

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

    def stalled(self, told: Told) -> None:
        """Shows why the job makes no progress."""
        if self._page is not None:
            self._page.stalled(told)

    def take_stacks(self) -> None:
        """Begins to take the stacks of this machine's workers for the page."""
        if self.local is not None:
            self.local.begin_to_take_stacks()

    def look_for_others(self, is_on: bool) -> None:
        """Begins or ends to tell the launcher that has the page what this machine's workers do."""
        if self._outlook is not None:
            self._outlook.close()
            self._outlook = None
        if is_on and self.local is not None:
            from paceline.launch.outlook import Outlook

            self._outlook = Outlook(self.local, self._workers, self._offset_s, self._connection.client.send)

    def look_last(self) -> None:
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
