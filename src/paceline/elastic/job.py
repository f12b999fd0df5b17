"""The facts about an elastic job, and the orders that are being put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.elastic.breaks import Breaks
from paceline.elastic.messages import Dismissed, Donating, Lesson, ToWorker
from paceline.elastic.orders import End, Order, Say, Tell
from paceline.elastic.policy import Policy
from paceline.elastic.roster import Place, Roster, Worker
from paceline.elastic.views import Views


@dataclass
class Job:
    """What is known of a job.

    Attributes:
        began_s: when it began.
        over: how it ended.
        fingerprint: of the first view's members, and thus of all.
        finished: the workers that have finished.
        ending_s: since when there are any.
        leaving_s: since when all members have been asked to leave.
        few_s: since when there are fewer members than the job needs.
        held: for whom everybody waits, and why.
        held_s: since when.
        due_s: when the facts have to be looked at again, if nothing happens.
        orders: what is to be done.
        is_shared: other launchers may have to coordinate the job when this one is lost.
        withheld: who is told the latest view once enough launchers know of it; None if it was told.
        lacks_quorum: the job waits for members without whom it may not go on.
        lessons: of learners that another coordinator has known, and that have not been heard of yet.
        donations: by lesson, what its donors have said.
        identity: tells this job from all others.
        quiet_until_s: no first view is given before.
        must_move: the members are to meet in another store, since the one of the latest view is about to end.
    """

    policy: Policy
    began_s: float
    roster: Roster
    views: Views
    breaks: Breaks = field(default_factory=Breaks)
    over: End | None = None
    fingerprint: str | None = None
    finished: list[Worker] = field(default_factory=list)
    ending_s: float | None = None
    leaving_s: float | None = None
    few_s: float | None = None
    held: str | None = None
    held_s: float = 0.0
    due_s: list[float] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    is_shared: bool = False
    withheld: list[Worker] | None = None
    lacks_quorum: bool = False
    lessons: dict[str, Lesson] = field(default_factory=dict)
    donations: dict[int, dict[str, Donating]] = field(default_factory=dict)
    must_move: bool = False
    identity: str = ""
    quiet_until_s: float = 0.0
    _said: str = ""

    def say(self, text: str) -> None:
        """Adds a sentence for the user, unless it was the last one too."""
        if text != self._said:
            self._said = text
            self.orders.append(Say(text))

    def tell(self, worker: Worker, message: ToWorker) -> None:
        """Adds a message for a worker that can be reached."""
        if worker.lives and worker.machine.is_reachable:
            self.orders.append(Tell(worker.machine.name, worker.uid, message))

    def dismiss(self, worker: Worker, reason: str, code: int = 0) -> None:
        """Tells a worker to end."""
        worker.place = Place.DISMISSED
        self.tell(worker, Dismissed(reason, code))

    def give(self, members: Sequence[Worker], *, is_planned: bool) -> None:
        """Makes the next view, and tells it to its members and to those whom it leaves out."""
        outside = (
            [each for each in self.roster.workers.values() if each.place is Place.OUTSIDE] if self.is_shared else []
        )
        told = {each.uid: each for each in [*members, *self.views.concerned, *outside]}
        must_wait = len(members) < self.policy.min_workers and self.ending_s is None
        self.views.give(members, is_planned=is_planned, must_wait=must_wait)
        if not is_planned:
            self.breaks.answered()
        self.withheld = list(told.values())
        self.release()

    def release(self) -> None:
        """Tells the latest view, once no other coordinator can come to its office without knowing of it."""
        view = self.views.latest
        if view is None or self.withheld is None or (self.is_shared and not self._may_tell()):
            return
        told, self.withheld = self.withheld, None
        for worker in told:
            self.tell(worker, view)

    def _may_tell(self) -> bool:
        return self.ending_s is not None or self.views.is_known()

    def remind(self, worker: Worker) -> None:
        """Tells a worker what it may have missed."""
        if worker.place is Place.DISMISSED:
            self.tell(worker, Dismissed("the job does not need it any more"))
            return
        base, latest = self.views.base, self.views.latest
        if self.withheld is not None:
            self.withheld.append(worker)
            latest = None
        elif base is not None and base is not latest and worker.uid in base.members:
            self.tell(worker, base)
        if latest is not None:
            self.tell(worker, latest)
        for lesson in self.open_lessons() if worker in self.views.team else ():
            self.tell(worker, lesson)
        for offer in worker.offers:
            self.tell(worker, offer)

    def open_lessons(self) -> list[Lesson]:
        """Returns the lessons of those that have not caught up with the others, as far as is known, oldest first."""
        learners = [each for each in self.roster.workers.values() if each.lives and not each.has_state]
        found = [each.lesson for each in learners if each.lesson is not None]
        return sorted([*found, *self.lessons.values()], key=lambda each: each.number)

    def end(self, end: End) -> None:
        """Ends the job."""
        self.over = end
        self.orders.append(end)

    def can_grow(self) -> bool:
        """Returns whether a worker may yet come: a machine's next, or a further machine."""
        return self.roster.begun() < self.policy.max_machines or self.roster.can_grow()
