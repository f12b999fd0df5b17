"""What the coordinator knows about each machine and each worker of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.train.elastic.protocol import ReplicatedJobState, StateTransfer, TransferOffer


class WorkerPhase(Enum):
    """Where a worker stands."""

    OUTSIDE = auto()  # it runs; it has not asked to take part, or not again since a view left it out
    READY = auto()  # it asks to take part
    MEMBER = auto()  # a view that still counts contains it
    DISMISSED = auto()  # it was told to end


@dataclass(eq=False)
class MachineRecord:
    """A machine whose launcher has joined the job.

    Attributes:
        named: after its return, the workers that it has named so far.
        lost_s: when it was heard of last, if it cannot be reached now.
        address: where its launcher can be reached by others.
        known: the latest view that its launcher knows of.
        told: what it was told last in case that it has to coordinate.
        has_left: its launcher has ended.
        has_said_so: it said that it would, so that this is no mistake.
        is_leaving: its launcher ends as soon as its workers have.
        store: where the members of views meet if its launcher coordinates.
    """

    name: str
    host: str
    slots: int
    is_reachable: bool = True
    has_begun: bool = False
    replaces: bool = True
    named: set[str] | None = None
    lost_s: float = 0.0
    address: str = ""
    known: int = 0
    told: ReplicatedJobState | None = None
    has_left: bool = False
    has_said_so: bool = False
    is_leaving: bool = False
    store: str = ""


@dataclass(eq=False)
class WorkerRecord:
    """A worker's process.

    Attributes:
        learns: it can catch up while others train, see `transfers.py`.
        has_caught_up: it has caught up.
        transfer: the transfer that it is given.
        refusals: the senders that cannot give that.
        offers: what it was told of the others.
        since: the first view that contains it, since it was ready last.
        installed: the latest view that it has entered.
        has_state: it has entered a view that contains it, so that its state is the job's.
        leaving: why it was asked to end, if it was.
        stalled: why its launcher thinks that it does nothing, if so.
        is_fenced: its launcher was told to kill it, as it does nothing.
        ended: how it ended.
        was_drained: all that it sent before it ended is known.
    """

    uid: str
    machine: MachineRecord
    place: WorkerPhase = WorkerPhase.OUTSIDE
    fingerprint: str = ""
    ready_s: float = 0.0
    learns: bool = False
    has_caught_up: bool = False
    transfer: StateTransfer | None = None
    refusals: set[str] = field(default_factory=set)
    offers: list[TransferOffer] = field(default_factory=list)
    since: int = 0
    installed: int = 0
    has_state: bool = False
    leaving: str | None = None
    has_finished: bool = False
    stalled: str | None = None
    is_fenced: bool = False
    ended: str | None = None
    exit_code: int = 0
    was_drained: bool = True

    @property
    def lives(self) -> bool:
        """Its end is not known."""
        return self.ended is None

    @property
    def is_here(self) -> bool:
        """It runs, and answers."""
        return self.ended is None and self.machine.is_reachable and self.stalled is None

    @property
    def trains(self) -> bool:
        """It is a member that can go on."""
        return self.place is WorkerPhase.MEMBER and self.is_here and not self.has_finished

    @property
    def may_return(self) -> bool:
        """It is a member that cannot go on now, but perhaps later."""
        return self.place is WorkerPhase.MEMBER and self.ended is None and not self.is_here and not self.has_finished

    @property
    def is_stopped(self) -> bool:
        """It does nothing, on a machine that answers: when it is continued, it goes on."""
        return self.ended is None and self.machine.is_reachable and self.stalled is not None

    def runs(self) -> None:
        """Notes that it does something."""
        self.stalled, self.is_fenced = None, False

    @property
    def has_left_well(self) -> bool:
        """It was asked to end, and did."""
        return self.ended is not None and self.leaving is not None and self.exit_code == 0

    @property
    def absence(self) -> str:
        """Why it is not here."""
        if self.ended is not None:
            return f"worker {self.uid} on {self.machine.host} has ended ({self.ended})"
        if not self.machine.is_reachable:
            return f"{self.machine.host}, with worker {self.uid}, cannot be reached"
        if self.stalled is not None:
            return f"worker {self.uid} on {self.machine.host} does not answer ({self.stalled})"
        return f"worker {self.uid} on {self.machine.host} has not reached the others"


@dataclass
class WorkerRegistry:
    """All machines and workers that have been heard of."""

    machines: dict[str, MachineRecord] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)

    def ready(self) -> list[WorkerRecord]:
        """Returns the workers that ask to take part and can, in the order in which they asked."""
        found = [each for each in self.workers.values() if each.place is WorkerPhase.READY and each.is_here]
        return sorted(found, key=lambda each: each.ready_s)

    def begun(self) -> int:
        """Returns how many machines that are reached have begun."""
        return sum(each.has_begun and each.is_reachable for each in self.machines.values())

    def expected(self) -> int:
        """Returns how many workers the machines keep running."""
        return sum(each.slots for each in self.machines.values() if each.has_begun and each.is_reachable)

    def can_grow(self) -> bool:
        """Returns whether a worker lives outside of all views, or may yet be started."""
        if any(each.slots and each.replaces and each.is_reachable for each in self.machines.values()):
            return True
        outside = (WorkerPhase.OUTSIDE, WorkerPhase.READY)
        return any(each.lives and each.place in outside for each in self.workers.values())
