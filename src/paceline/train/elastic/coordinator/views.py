"""The views (membership epochs) that a coordinator has issued, and the workers that may be in the next view.

    base      the last view that all its members have entered, or a later forced view. Its members hold the job's
              state.
    latest    the last view issued: the base, or a planned view that some members have not entered yet. The
              *newcomers* are the members of the latest view that are not in the base.

A newcomer is included in a forced view only if it has entered the planned view. Before that, the newcomer holds a
random initial state, which must never become the job's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.train.elastic.coordinator.worker_registry import WorkerPhase, WorkerRecord, WorkerRegistry
from paceline.train.elastic.protocol import View, has_quorum

_REMEMBERED = 64  # number of views whose members are kept to interpret late reports


@dataclass
class Views:
    """The views issued by one coordinator. The upper bits of their generations are the coordinator's term."""

    registry: WorkerRegistry
    term: int
    base: View | None = None
    latest: View | None = None
    base_team: list[WorkerRecord] = field(default_factory=list)  # the members of the base
    team: list[WorkerRecord] = field(default_factory=list)  # the members of the latest view
    newcomers: list[WorkerRecord] = field(default_factory=list)
    is_complete: bool = False  # whether all members of the latest view have entered it
    has_begun: bool = False  # whether all members of any view have entered it; before that, no round can be committed
    since_complete: list[View] = field(default_factory=list)  # the last complete view, and the views issued since
    completed: int = 0  # the generation of the last complete view, or 0
    store: str = ""  # the store that members of future views use for their rendezvous
    must_meet: bool = False  # whether members of the latest view may be waiting at a store that no longer exists
    _count: int = 0
    _members_of: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _missing_in: dict[int, set[str]] = field(default_factory=dict)  # members that have not entered, by generation

    def give(self, members: Iterable[WorkerRecord], *, is_planned: bool, must_wait: bool) -> View:
        """Issues the next view, and removes the members of earlier views that the next view does not contain.

        A planned view removes members of the base only after all members of the planned view have entered it.
        """
        team = sorted(members, key=lambda member: member.uid)  # so that ranks do not depend on the order of requests
        names = tuple(member.uid for member in team)
        previous = 0 if self.latest is None else self.latest.generation
        view = View(self.next_number(), names, is_planned, must_wait, self.store, previous)
        for worker in self.concerned:
            if not (worker in team or (is_planned and worker in self.base_team)):
                self._leave_out(worker)
        for worker in team:
            if worker.phase is not WorkerPhase.MEMBER:
                worker.phase, worker.since = WorkerPhase.MEMBER, view.generation
                worker.has_state = False
        self.latest, self.team, self.is_complete, self.must_meet = view, team, False, False
        if not is_planned:
            self._rest_on_latest()
        self.newcomers = [member for member in self.team if member not in self.base_team]
        self.since_complete.append(view)
        self._members_of[view.generation] = view.members
        self._missing_in[view.generation] = set(view.members)
        if len(self._members_of) > _REMEMBERED:
            oldest = min(self._members_of)
            del self._members_of[oldest], self._missing_in[oldest]
        return view

    def next_number(self) -> int:
        """Returns a number larger than that of any earlier view or transfer."""
        self._count += 1
        return (self.term << 32) + self._count

    def forget(self) -> None:
        """Resets the views if all members exited before any round could be committed."""
        self.latest, self.team = None, []
        self._rest_on_latest()
        self.since_complete = []

    def entered(self, worker: WorkerRecord, generation: int) -> None:
        """Records that a worker has entered a view, not necessarily the latest."""
        worker.installed = max(worker.installed, generation)
        missing = self._missing_in.get(generation)
        if missing is not None:
            missing.discard(worker.uid)
            self.has_begun = self.has_begun or not missing
        if worker.phase is not WorkerPhase.MEMBER or generation < worker.since or self.latest is None:
            return
        worker.has_state = True
        if not self.is_complete and not self._missing_in[self.latest.generation]:
            self.is_complete = True
            for member in self.base_team:
                if member not in self.team:
                    self._leave_out(member)
            self._rest_on_latest()
            self.since_complete, self.completed = [self.latest], self.latest.generation

    def resume(self, given: Sequence[View], completed: int) -> None:
        """Takes over from another coordinator, given its last complete view (if any) and all later ones.

        Rounds may have been committed. If not all members had entered the latest view, some may be waiting at a store
        that no longer exists, and a new view is required.
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
            [self.registry.workers[uid] for uid in view.members] for view in (self.base, given[-1])
        )
        self.newcomers = [member for member in self.team if member not in self.base_team]
        before: View | None = None
        for view in given:
            self._members_of[view.generation] = view.members
            self._missing_in[view.generation] = set() if view.generation <= completed else set(view.members)
            for uid in view.members:
                if before is None or uid not in before.members:
                    self.registry.workers[uid].since = view.generation
            before = view
        for worker in self.concerned:
            worker.phase = WorkerPhase.MEMBER
            worker.has_state = any(view.generation == completed and worker.uid in view.members for view in given)

    @property
    def concerned(self) -> list[WorkerRecord]:
        """The members of the base and the newcomers."""
        return self.base_team + self.newcomers

    def may_have_begun(self) -> bool:
        """Returns True if any round may have been committed.

        A round requires a view that all its members have entered. Whether there was such a view is unknown while any
        worker is running, or if a worker died on an unreachable machine, because messages from that machine may be
        missing.
        """
        workers = {uid: self.registry.workers[uid] for view in self.since_complete for uid in view.members}
        return self.has_begun or any(worker.lives or not worker.was_drained for worker in workers.values())

    def sources(self) -> list[WorkerRecord]:
        """Returns the members that may continue in a forced view.

        These are members of the base, which hold the job's state, and newcomers that have received it. If no view was
        ever complete, no round can have been committed, and any member's state is valid.
        """
        base = [worker for worker in self.base_team if worker.trains]
        return base + [worker for worker in self.newcomers if worker.trains and has_arrived(worker)]

    def members_of(self, generation: int) -> tuple[str, ...]:
        """Returns the names of the members of a view, or () if the view is no longer remembered."""
        return self._members_of.get(generation, ())

    def is_explained(self, generation: int) -> bool:
        """Returns True if a member of the view is known to be absent, which explains the broken connections."""
        return any(not self.registry.workers[uid].trains for uid in self.members_of(generation))

    def is_allowed(self) -> bool:
        """Returns True if the reachable machines may continue without the other machines.

        This requires a quorum of every view since the last complete one, because a coordinator on the other side of a
        partition may have received only some of these views.
        """
        workers = self.registry.workers
        dead = [worker.uid for worker in workers.values() if not worker.lives]
        reached = [worker.uid for worker in workers.values() if worker.lives and worker.machine.is_reachable]
        return all(has_quorum(view.members, dead, reached) for view in self.since_complete)

    def is_known(self) -> bool:
        """Returns True if launchers with a quorum of each earlier view hold the latest view.

        If so, any later coordinator also holds the view, and workers may enter it. The launchers of the view's members
        always count, because they receive the view before they pass it on.
        """
        if self.latest is None:
            return True
        workers, latest = self.registry.workers, self.latest.generation
        dead = [worker.uid for worker in workers.values() if not worker.lives]
        informed = {worker.uid for worker in workers.values() if worker.machine.known >= latest} | {
            *self.latest.members
        }
        return all(has_quorum(view.members, dead, informed) for view in self.since_complete if view is not self.latest)

    def is_on_its_way_to(self, store: str) -> bool:
        """Returns True if members of the latest view are about to use `store` for their rendezvous."""
        return self.latest is not None and not self.is_complete and self.latest.store == store

    def undecided(self) -> list[WorkerRecord]:
        """Returns the running members of the views since the last complete one.

        The quorum consists of the launchers of these workers.
        """
        members = {uid for view in self.since_complete for uid in view.members}
        return [worker for worker in self.registry.workers.values() if worker.lives and worker.uid in members]

    def _rest_on_latest(self) -> None:
        self.base, self.base_team, self.newcomers = self.latest, self.team, []

    def _leave_out(self, worker: WorkerRecord) -> None:
        """Removes a member. If it holds no state yet, it stays ready; otherwise it must request to join again."""
        if worker.phase is WorkerPhase.MEMBER and not worker.has_finished:
            if worker.has_state:
                worker.loses_state()
            else:
                worker.phase = WorkerPhase.READY


def has_arrived(newcomer: WorkerRecord) -> bool:
    """Returns True if a newcomer may be a member of a forced view."""
    return newcomer.has_state
