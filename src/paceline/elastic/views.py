"""The views that a coordinator has given out, and who may be in the next one.

    base      the last view that all its members have entered, or that was forced after it. The job's state is with
              its members; once one view was entered by all, only with those of whom it is known that they hold it.
    latest    the last view given out: the base, or a planned view that not all its members have entered yet. The
              *newcomers* are those that are in it and not in the base.

A newcomer belongs to a forced view only if it has entered the planned view: before that it holds a random state, which
must never become the job's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.elastic.messages import View
from paceline.elastic.quorum import has_quorum
from paceline.elastic.roster import Place, Roster, Worker

_REMEMBERED = 64  # views whose members are kept, to explain reports that come late


@dataclass
class Views:
    """The views of one coordinator; their numbers begin with its term."""

    roster: Roster
    term: int
    latest: View | None = None
    base: View | None = None
    has_begun: bool = False  # some view was entered by all its members, so that rounds may have been committed
    is_complete: bool = False  # the latest view has
    since_complete: list[tuple[str, ...]] = field(
        default_factory=list
    )  # that view's members, and of all given out since
    _count: int = 0
    _members_of: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _missing_in: dict[int, set[str]] = field(default_factory=dict)  # who has not entered a view

    def give(self, members: Iterable[Worker], *, is_planned: bool, must_wait: bool) -> View:
        """Makes the next view, and leaves out those members of the views before that are not in it."""
        self._count += 1
        chosen = sorted(members, key=lambda each: each.uid)  # ranks that do not depend on who was ready first
        view = View((self.term << 32) + self._count, tuple(each.uid for each in chosen), is_planned, must_wait)
        for worker in self.concerned():
            if worker.uid not in view.members and worker.place is Place.MEMBER and not worker.has_finished:
                keeps = is_planned and worker.uid in self.base_members
                worker.place = Place.MEMBER if keeps else Place.OUTSIDE
                worker.has_state = worker.has_state and keeps
        for worker in chosen:
            if worker.place is not Place.MEMBER:
                worker.place, worker.since = Place.MEMBER, view.generation
                worker.has_state = worker.denies = False
        self.latest, self.is_complete = view, False
        if not is_planned or self.base is None:
            self.base = view
        self.since_complete.append(view.members)
        self._members_of[view.generation] = view.members
        self._missing_in[view.generation] = set(view.members)
        if len(self._members_of) > _REMEMBERED:
            oldest = min(self._members_of)
            del self._members_of[oldest], self._missing_in[oldest]
        return view

    def forget(self) -> None:
        """Begins again with nothing, after all members have died before any round could be committed."""
        self.latest = self.base = None
        self.since_complete = []

    def entered(self, worker: Worker, generation: int) -> None:
        """A worker has entered a view, which may not be the latest any more, and may have left it out since."""
        worker.installed = max(worker.installed, generation)
        missing = self._missing_in.get(generation, {""})
        missing.discard(worker.uid)
        if not missing:
            self.has_begun = True
        if worker.place is not Place.MEMBER or generation < worker.since or self.latest is None:
            return
        worker.has_state = True
        self.is_complete = not self._missing_in[self.latest.generation]
        if self.is_complete:
            leavers = [each for each in self.roster.named(self.base_members) if each.uid not in self.latest.members]
            for each in leavers:
                each.place, each.has_state = Place.OUTSIDE, False
            self.base = self.latest
            self.since_complete = [self.latest.members]

    @property
    def base_members(self) -> tuple[str, ...]:
        """The names of the base's members."""
        return self.base.members if self.base is not None else ()

    def members_of(self, generation: int) -> tuple[str, ...]:
        """Returns the names of the members of a view, if it is not too long ago."""
        return self._members_of.get(generation, ())

    def members(self) -> list[Worker]:
        """Returns the members of the latest view."""
        return self.roster.named(self.latest.members) if self.latest is not None else []

    def newcomers(self) -> list[Worker]:
        """Returns the members of the latest view that are not in the base."""
        return [each for each in self.members() if each.uid not in self.base_members]

    def concerned(self) -> list[Worker]:
        """Returns the members of the base and the newcomers."""
        return self.roster.named(self.base_members) + self.newcomers()

    def sources(self) -> list[Worker]:
        """Returns the members that may go on in a forced view: those that hold the job's state, or may make it."""
        base = [
            each for each in self.roster.named(self.base_members) if each.trains and may_go_on(each, self.has_begun)
        ]
        return base + [each for each in self.newcomers() if each.trains and has_arrived(each)]

    def is_explained(self, generation: int) -> bool:
        """Returns whether a member of that view is known to be gone, which explains that its connections broke."""
        return any(not each.trains for each in self.roster.named(self.members_of(generation)))

    def is_allowed(self) -> bool:
        """Returns whether the machines that are reached may go on without the others.

        Each view since the last that all have entered has to agree: another coordinator, which reaches the others,
        may know of only some of them.
        """
        workers = self.roster.workers
        dead = [each.uid for each in workers.values() if not each.lives]
        reached = [each.uid for each in workers.values() if each.lives and each.machine.is_reachable]
        return all(has_quorum(members, dead, reached) for members in self.since_complete)


def may_go_on(worker: Worker, has_begun: bool) -> bool:
    """Returns whether a member of the base may be in a forced view.

    Before a view was entered by all its members no round can have been committed, so that every state is as good.
    """
    return worker.has_state or not has_begun


def has_arrived(newcomer: Worker) -> bool:
    """Returns whether a newcomer may be in a forced view."""
    return newcomer.has_state
