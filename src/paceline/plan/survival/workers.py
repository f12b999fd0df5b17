"""A worker as the coordinator sees one: what it says, and when it enters views.

A group stands for the connections of one view's members. Its members make steps together; it breaks when one is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.elastic.messages import (
    Broken,
    Dismissed,
    Donating,
    Installed,
    Learn,
    Learned,
    Lesson,
    Ready,
    ToWorker,
    View,
)

if TYPE_CHECKING:
    from paceline.plan.survival.job import Job


class Worker:
    """A process of the job. It is starting, ready, learning, caught up, forming, working, broken, or gone."""

    __slots__ = ("group", "job", "latest", "lesson", "lessons", "machine", "state", "trains", "uid")

    def __init__(self, job: Job, uid: str, machine: str) -> None:
        self.job, self.uid, self.machine = job, uid, machine
        self.state = "starting"
        self.trains = False  # it has been in a view whose members had all come
        self.group: Group | None = None
        self.latest: View | None = None
        self.lesson = 0
        self.lessons: list[Lesson] = []  # for which it takes a snapshot at the end of the step

    def started(self) -> None:
        """The script has come to its loop."""
        if self.state == "starting":
            self.state = "ready"
            self.job.says(self, Ready("", learns=True))

    def hear(self, message: ToWorker) -> None:
        """The coordinator says something."""
        if self.state == "gone":
            return
        if isinstance(message, View):
            self._hear_view(message)
        elif isinstance(message, Lesson):
            if self.uid in message.donors:
                self.lessons.append(message)
        elif isinstance(message, Learn):
            self._learn(message)
        elif isinstance(message, Dismissed):
            self.job.ends(self, message.code)

    def _hear_view(self, view: View) -> None:
        if self.latest is not None and view.generation <= self.latest.generation:
            return
        self.latest = view
        if self.uid in view.members:
            if not view.is_planned or not self.trains:
                self.enter(view)
            elif self.group is not None:
                self.group.planned = view
        elif self.trains:
            self.job.ends(self, 75)
        elif self.group is not None and not view.is_planned:
            # It was to come in by a view that nobody enters any more, and tries again.
            self.job.says(self, Broken(self.group.view.generation, self.job.steps, "there is a later view"))
            self.state, self.group = "caught up", None
            self.job.says(self, Learned(self.job.steps))

    def enter(self, view: View) -> None:
        """Meets the members of a view."""
        if self.group is not None and self.group.view.generation < view.generation:
            self.group.is_over = True
        self.state, self.group = "forming", self.job.group(view)
        self.group.arrive(self)

    def _learn(self, offer: Learn) -> None:
        if self.state == "ready" and offer.lesson > self.lesson:
            self.state, self.lesson = "learning", offer.lesson
            times = self.job.times
            # While it copies, the others go on; and while it makes their steps, they make further ones.
            takes_s = times.copying_s / (1 - times.replaying)
            self.job.learners += 1
            self.job.after(times.copying_s, self._copied)
            self.job.after(takes_s, self._caught_up)

    def _copied(self) -> None:
        self.job.learners -= 1

    def _caught_up(self) -> None:
        if self.state == "learning":
            self.state = "caught up"
            self.job.says(self, Learned(self.job.steps))


class Group:
    """The connections of a view."""

    __slots__ = ("arrived", "begun_s", "ends_s", "is_over", "job", "lasts_s", "planned", "view")

    def __init__(self, job: Job, view: View) -> None:
        self.job, self.view = job, view
        self.arrived: dict[str, Worker] = {}
        self.is_over = False
        self.planned: View | None = None
        self.begun_s = self.lasts_s = 0.0

    def arrive(self, worker: Worker) -> None:
        """A member has come. Once all have, they make ready, and are connected a while later."""
        self.arrived[worker.uid] = worker
        if not self.is_over and len(self.arrived) == len(self.view.members):
            times = self.job.times
            self.job.after(times.forming_s + (times.meeting_s if len(self.arrived) > 1 else 0.0), self._formed)

    def _formed(self) -> None:
        if self.is_over:
            return
        for worker in self.arrived.values():
            worker.state, worker.trains = "working", True
            self.job.says(worker, Installed(self.view.generation, self.job.steps))
        if self.planned is None and not self.view.must_wait:
            self.begin_step()
        elif self.planned is not None:
            self._enter_planned(self.planned)

    def begin_step(self) -> None:
        """Computes what is left of the step."""
        job = self.job
        self.begun_s = job.now_s
        self.lasts_s = job.left_s * job.slowness_of(len(self.view.members))
        steps = job.steps_until_news(self.lasts_s)
        job.after(steps * self.lasts_s, self._commit, steps)

    def _commit(self, steps: int) -> None:
        if self.is_over:
            return
        job = self.job
        job.committed(steps)
        for worker in list(self.arrived.values()):
            for lesson in worker.lessons:
                job.says(worker, Donating(lesson.number, job.steps, worker.uid))
            worker.lessons.clear()
        if self.planned is not None:
            self._enter_planned(self.planned)
        elif not self.view.must_wait:
            self.begin_step()

    def _enter_planned(self, view: View) -> None:
        self.is_over = True
        for worker in list(self.arrived.values()):
            if worker.uid in view.members:
                worker.enter(view)
            else:
                self.job.ends(worker, 0)

    def lose(self, workers: int, notices_s: float) -> None:
        """So many members are gone: the others keep what they have computed, and notice after that time."""
        if self.is_over:
            return
        self.is_over = True
        self.job.keep(self, workers)
        self.job.after(notices_s, self._broke)

    def _broke(self) -> None:
        for worker in self.arrived.values():
            if worker.group is self and worker.state in ("forming", "working"):
                worker.state = "broken"
                self.job.says(worker, Broken(self.view.generation, self.job.steps, "a peer is gone"))
