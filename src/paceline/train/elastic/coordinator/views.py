"""The views that a coordinator has given out, and who may be in the next one.

    base      the last view that all its members have entered, or that was forced after it. The job's state is with
              its members.
    latest    the last view given out: the base, or a planned view that not all its members have entered yet. The
              *newcomers* are those that are in it and not in the base.

A newcomer belongs to a forced view only if it has entered the planned view: before that it holds a random state, which
must never become the job's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.train.elastic.coordinator.worker_registry import WorkerPhase, WorkerRecord, WorkerRegistry
from paceline.train.elastic.protocol import View, has_quorum

_REMEMBERED = 64  # views whose members are kept, to explain reports that come late


@dataclass
class Views:
    """The views of one coordinator; their numbers begin with its term.

    Attributes:
        base: see above; `base_team` are its members.
        latest: see above; `team` are its members.
        is_complete: all members of the latest view have entered it.
        has_begun: some view was entered by all its members, so that rounds may have been committed.
        since_complete: the last view that all have entered, and those given out since.
        completed: the number of the last view that all have entered, 0 without one.
        store: where the members of views to come meet.
        must_meet: the members of the latest view may be on their way to a store that is gone.
    """

    roster: WorkerRegistry
    term: int
    base: View | None = None
    latest: View | None = None
    base_team: list[WorkerRecord] = field(default_factory=list)
    team: list[WorkerRecord] = field(default_factory=list)
    newcomers: list[WorkerRecord] = field(default_factory=list)
    is_complete: bool = False
    has_begun: bool = False
    since_complete: list[View] = field(default_factory=list)
    completed: int = 0
    store: str = ""
    must_meet: bool = False
    _count: int = 0
    _members_of: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _missing_in: dict[int, set[str]] = field(default_factory=dict)  # who has not entered a view

    def give(self, members: Iterable[WorkerRecord], *, is_planned: bool, must_wait: bool) -> View:
        """Makes the next view, and leaves out those members of the views before that are not in it.

        Members of the base that a planned view leaves out stay members until all have entered it.
        """
        team = sorted(members, key=lambda each: each.uid)  # ranks that do not depend on who was ready first
        names = tuple(each.uid for each in team)
        view = View(self.next_number(), names, is_planned, must_wait, self.store)
        for worker in self.concerned:
            if not (worker in team or (is_planned and worker in self.base_team)):
                self._leave_out(worker)
        for worker in team:
            if worker.place is not WorkerPhase.MEMBER:
                worker.place, worker.since = WorkerPhase.MEMBER, view.generation
                worker.has_state = False
        self.latest, self.team, self.is_complete, self.must_meet = view, team, False, False
        if not is_planned:
            self._rest_on_latest()
        self.newcomers = [each for each in self.team if each not in self.base_team]
        self.since_complete.append(view)
        self._members_of[view.generation] = view.members
        self._missing_in[view.generation] = set(view.members)
        if len(self._members_of) > _REMEMBERED:
            oldest = min(self._members_of)
            del self._members_of[oldest], self._missing_in[oldest]
        return view

    def next_number(self) -> int:
        """Returns a number that is larger than that of any view and transfer before."""
        self._count += 1
        return (self.term << 32) + self._count

    def forget(self) -> None:
        """Begins again with nothing, after all members have died before any round could be committed."""
        self.latest, self.team = None, []
        self._rest_on_latest()
        self.since_complete = []

    def entered(self, worker: WorkerRecord, generation: int) -> None:
        """A worker has entered a view, which may not be the latest any more, and may have left it out since."""
        worker.installed = max(worker.installed, generation)
        missing = self._missing_in.get(generation)
        if missing is not None:
            missing.discard(worker.uid)
            self.has_begun = self.has_begun or not missing
        if worker.place is not WorkerPhase.MEMBER or generation < worker.since or self.latest is None:
            return
        worker.has_state = True
        if not self.is_complete and not self._missing_in[self.latest.generation]:
            self.is_complete = True
            for each in self.base_team:
                if each not in self.team:
                    self._leave_out(each)
            self._rest_on_latest()
            self.since_complete, self.completed = [self.latest], self.latest.generation

    def resume(self, given: Sequence[View], completed: int) -> None:
        """Goes on from what another coordinator has given: the last complete view, if there is any, and all after it.

        Rounds may have been committed. If the latest view was not entered by all, its members may be on their way to a
        store that is gone, and need another view.
        """
        self.since_complete, self.completed, self.has_begun = list(given), completed, True
        is_planned = [view.is_planned and view.generation != completed for view in given]
        self.base = next(
            view for view, planned in zip(reversed(given), reversed(is_planned), strict=True) if not planned
        )
        self.latest = given[-1]
        self.is_complete = self.latest.generation == completed
        self.must_meet = not self.is_complete
        self.base_team, self.team = (
            [self.roster.workers[uid] for uid in each.members] for each in (self.base, given[-1])
        )
        self.newcomers = [each for each in self.team if each not in self.base_team]
        before: View | None = None
        for view in given:
            self._members_of[view.generation] = view.members
            self._missing_in[view.generation] = set() if view.generation <= completed else set(view.members)
            for uid in view.members:
                if before is None or uid not in before.members:
                    self.roster.workers[uid].since = view.generation
            before = view
        for worker in self.concerned:
            worker.place = WorkerPhase.MEMBER
            worker.has_state = any(view.generation == completed and worker.uid in view.members for view in given)

    @property
    def concerned(self) -> list[WorkerRecord]:
        """The members of the base and the newcomers."""
        return self.base_team + self.newcomers

    def may_have_begun(self) -> bool:
        """Returns whether a round may have been committed, as far as is known of all that were ever members.

        It takes all members of a view. What the dead have said is known, unless their machine was out of reach.
        """
        workers = {uid: self.roster.workers[uid] for view in self.since_complete for uid in view.members}
        return self.has_begun or any(each.lives or not each.was_drained for each in workers.values())

    def sources(self) -> list[WorkerRecord]:
        """Returns the members that may go on in a forced view.

        The members of the base hold the job's state, unless no view was ever entered by all its members: then no round
        can have been committed, and every state is as good.
        """
        base = [each for each in self.base_team if each.trains]
        return base + [each for each in self.newcomers if each.trains and has_arrived(each)]

    def members_of(self, generation: int) -> tuple[str, ...]:
        """Returns the names of the members of a view, if it is not too long ago."""
        return self._members_of.get(generation, ())

    def is_explained(self, generation: int) -> bool:
        """Returns whether a member of that view is known to be gone, which explains that its connections broke."""
        return any(not self.roster.workers[uid].trains for uid in self.members_of(generation))

    def is_allowed(self) -> bool:
        """Returns whether the machines that are reached may go on without the others.

        Each view since the last that all have entered has to agree: another coordinator, which reaches the others,
        may know of only some of them.
        """
        workers = self.roster.workers
        dead = [each.uid for each in workers.values() if not each.lives]
        reached = [each.uid for each in workers.values() if each.lives and each.machine.is_reachable]
        return all(has_quorum(view.members, dead, reached) for view in self.since_complete)

    def is_known(self) -> bool:
        """Returns whether launchers with a quorum of each view before the latest know of that one.

        Then whoever coordinates after this launcher knows of it too, and it may be entered. A view is passed on to its
        members last, so those count in any case.
        """
        if self.latest is None:
            return True
        workers, latest = self.roster.workers, self.latest.generation
        dead = [each.uid for each in workers.values() if not each.lives]
        know = {each.uid for each in workers.values() if each.machine.known >= latest} | {*self.latest.members}
        return all(has_quorum(view.members, dead, know) for view in self.since_complete if view is not self.latest)

    def is_on_its_way_to(self, store: str) -> bool:
        """Returns whether members of the latest view are about to meet in a store."""
        return self.latest is not None and not self.is_complete and self.latest.store == store

    def undecided(self) -> list[WorkerRecord]:
        """Returns the workers on whose launchers it depends who may go on, as far as they are not known to be dead."""
        members = {uid for view in self.since_complete for uid in view.members}
        return [each for each in self.roster.workers.values() if each.lives and each.uid in members]

    def _rest_on_latest(self) -> None:
        self.base, self.base_team, self.newcomers = self.latest, self.team, []

    def _leave_out(self, worker: WorkerRecord) -> None:
        """Lets a worker that had no state yet go on waiting; another has to ask again."""
        if worker.place is WorkerPhase.MEMBER and not worker.has_finished:
            worker.place = WorkerPhase.OUTSIDE if worker.has_state else WorkerPhase.READY
            worker.has_state = False


def has_arrived(newcomer: WorkerRecord) -> bool:
    """Returns whether a newcomer may be in a forced view."""
    return newcomer.has_state
