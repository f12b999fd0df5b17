"""What every launcher knows of an elastic job, so that any of them can coordinate it when the one that does is lost."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline.elastic.messages import FromWorker, Lesson, View
from paceline.elastic.quorum import has_quorum

_NUMBERS = 1 << 16  # of machines in a job
_MOST_LESSONS = 16  # that are remembered


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A machine, and where its launcher can be reached by the others."""

    number: int
    host: str
    address: str


class Knowledge(msgspec.Struct, frozen=True):
    """Facts about a job. They never become false, so those of several launchers can be put together.

    Whoever knows that a worker is dead knows all views that this worker's launcher ever passed on to it.

    Attributes:
        term: the largest of a coordinator that was heard of.
        coordinator: the number of the machine with that coordinator.
        fingerprint: of the job's members.
        complete: the number of the last view that all its members are known to have entered, 0 without one.
        views: that view, and all that were given after it.
        dead: workers in them whose end was confirmed.
        ended: machines whose launchers have ended, and their workers with them.
        peers: the machines.
        lessons: the last one of each learner that may not have caught up with the others.
        job: tells the job from all others.
    """

    term: int = 0
    coordinator: int = -1
    fingerprint: str = ""
    complete: int = 0
    views: tuple[View, ...] = ()
    dead: tuple[str, ...] = ()
    ended: tuple[int, ...] = ()
    peers: tuple[Peer, ...] = ()
    lessons: tuple[Lesson, ...] = ()
    job: str = ""

    def is_dead(self, uid: str) -> bool:
        """Returns whether a worker's end was confirmed."""
        return uid in self.dead or machine_of(uid) in self.ended

    @property
    def members(self) -> list[str]:
        """The members of all the views, in order of their names."""
        return sorted({uid for view in self.views for uid in view.members})

    def allows(self, reached: Iterable[str]) -> bool:
        """Returns whether whoever reaches these living workers may go on without the others."""
        here = set(reached)
        dead = [uid for uid in self.members if self.is_dead(uid)]
        return all(has_quorum(view.members, dead, here) for view in self.views)


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """A worker that runs: what it said that still matters, and why its launcher thinks that it does nothing."""

    uid: str
    said: tuple[FromWorker, ...] = ()
    stalled: str | None = None


class Report(msgspec.Struct, frozen=True):
    """What a launcher tells a coordinator that it follows from now on.

    Attributes:
        number: of its machine.
        host: its name.
        slots: how many workers it keeps running.
        first_slot: the number of the first of its slots in the job.
        knowledge: what it knows of the job.
        workers: those that run.
        ended: the names of those that have ended, how, and their exit codes.
        is_leaving: it ends as soon as its workers have.
    """

    number: int
    host: str
    slots: int
    first_slot: int
    knowledge: Knowledge
    workers: tuple[WorkerReport, ...] = ()
    ended: tuple[tuple[str, str, int], ...] = ()
    is_leaving: bool = False


def machine_of(uid: str) -> int:
    """Returns the number of a worker's machine."""
    return int(uid.partition(".")[0])


def merge(parts: Iterable[Knowledge]) -> Knowledge:
    """Returns all that is known to any of several launchers."""
    known = sorted(parts, key=lambda each: (each.term, each.coordinator))
    if not known:
        return Knowledge()
    complete = max(each.complete for each in known)
    views = {view.generation: view for each in known for view in each.views if view.generation >= complete}
    kept = tuple(views[generation] for generation in sorted(views))
    members = {uid for view in kept for uid in view.members}
    return Knowledge(
        term=known[-1].term,
        coordinator=known[-1].coordinator,
        fingerprint=next((each.fingerprint for each in reversed(known) if each.fingerprint), ""),
        complete=complete,
        views=kept,
        dead=tuple(sorted({uid for each in known for uid in each.dead if uid in members})),
        ended=tuple(sorted({number for each in known for number in each.ended})),
        peers=tuple({peer.number: peer for each in known for peer in each.peers}.values()),
        lessons=_open(
            (lesson for each in known for lesson in each.lessons), views[complete].members if complete in views else ()
        ),
        job=next((each.job for each in reversed(known) if each.job), ""),
    )


def _open(lessons: Iterable[Lesson], members: Iterable[str]) -> tuple[Lesson, ...]:
    """Returns the last lesson of each learner, without those of the members, which are over."""
    latest = {each.learner: each for each in sorted(lessons, key=lambda each: each.number)}
    kept = [each for each in latest.values() if each.learner not in members]
    return tuple(sorted(kept, key=lambda each: each.number)[-_MOST_LESSONS:])


def next_term(term: int, number: int) -> int:
    """Returns the term of a coordinator on machine `number` that is to follow `term`; no two machines have the same."""
    return ((term // _NUMBERS + 1) * _NUMBERS) + number % _NUMBERS
