"""The coordinator's records of the machines and workers of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.train.elastic.protocol import ReplicatedJobState, StateTransfer, TransferOffer


class WorkerPhase(Enum):
    """The phase of a worker's membership."""

    OUTSIDE = auto()  # it runs but has not requested to join, at least not since it was left out of a view
    READY = auto()  # it has requested to join
    MEMBER = auto()  # a valid view contains it
    DISMISSED = auto()  # it was ordered to end


@dataclass(eq=False)
class MachineRecord:
    """A machine whose launcher has joined the job.

    Attributes:
        name: The machine's name, unique in the job.
        host: The host name, for messages.
        slots: The number of workers that the launcher keeps running.
        has_begun: Whether the launcher has been ordered to start its workers.
        replaces: Whether the launcher replaces workers that end.
        listed: The workers reported so far after the machine reconnected; None if no such report is in progress.
        lost_s: The time of the last contact, if the machine is unreachable.
        address: The address of the launcher for other launchers.
        known: The generation of the latest view that the launcher has confirmed to hold.
        replicated: The job state that was last replicated to the launcher.
        has_left: Whether the launcher has ended.
        has_announced_end: Whether the launcher has announced its end, which is therefore certain.
        is_leaving: Whether the launcher ends as soon as its workers have ended.
        store: The store in which members of views meet if this launcher coordinates.
    """

    name: str
    host: str
    slots: int
    is_reachable: bool = True
    has_begun: bool = False
    replaces: bool = True
    listed: set[str] | None = None
    lost_s: float = 0.0
    address: str = ""
    known: int = 0
    replicated: ReplicatedJobState | None = None
    has_left: bool = False
    has_announced_end: bool = False
    is_leaving: bool = False
    store: str = ""


@dataclass(eq=False)
class WorkerRecord:
    """A worker process.

    Attributes:
        uid: The worker's name, unique in the job.
        machine: The machine on which it runs.
        fingerprint: A text that is equal in workers whose results are bitwise equal.
        ready_s: The time at which the worker became ready.
        learns: Whether the worker can catch up while others train (see `membership_rules.py`).
        has_caught_up: Whether the worker has caught up.
        transfer: The state transfer to the worker, or None.
        refusals: The senders that cannot serve the transfer.
        offers: The offers of senders that were passed on to the worker.
        since: The generation of the first view that contains the worker since it was last ready.
        installed: The generation of the latest view that the worker has entered.
        has_state: Whether the worker has entered a view that contains it, and therefore holds the job's state.
        leaving: The reason why the worker was asked to end, or None.
        has_finished: Whether the worker's training loop has completed.
        stalled: The launcher's reason to consider it unresponsive, or None.
        is_fenced: Whether its launcher was ordered to kill it because it is stalled.
        ended: The cause of the worker's end, or None.
        was_drained: Whether all messages that the worker sent before its end have been received.
    """

    uid: str
    machine: MachineRecord
    phase: WorkerPhase = WorkerPhase.OUTSIDE
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
        """Whether no end of the worker has been reported."""
        return self.ended is None

    @property
    def is_here(self) -> bool:
        """Whether it runs and responds."""
        return self.ended is None and self.machine.is_reachable and self.stalled is None

    @property
    def trains(self) -> bool:
        """Whether it is a member that can continue."""
        return self.phase is WorkerPhase.MEMBER and self.is_here and not self.has_finished

    @property
    def may_return(self) -> bool:
        """Whether it is a member that cannot continue now but may later."""
        return self.phase is WorkerPhase.MEMBER and self.ended is None and not self.is_here and not self.has_finished

    @property
    def is_stopped(self) -> bool:
        """Whether it is unresponsive on a reachable machine; it resumes when the process is continued."""
        return self.ended is None and self.machine.is_reachable and self.stalled is not None

    def runs(self) -> None:
        """Records that the worker is responsive."""
        self.stalled, self.is_fenced = None, False

    @property
    def has_left_well(self) -> bool:
        """Whether the worker was asked to end and did so with exit code 0."""
        return self.ended is not None and self.leaving is not None and self.exit_code == 0

    @property
    def absence(self) -> str:
        """The reason for its absence, for messages."""
        if self.ended is not None:
            return f"worker {self.uid} on {self.machine.host} has ended ({self.ended})"
        if not self.machine.is_reachable:
            return f"{self.machine.host}, with worker {self.uid}, cannot be reached"
        if self.stalled is not None:
            return f"worker {self.uid} on {self.machine.host} does not answer ({self.stalled})"
        return f"worker {self.uid} on {self.machine.host} has not reached the others"


@dataclass
class WorkerRegistry:
    """All machines and workers of the job, including those that have ended."""

    machines: dict[str, MachineRecord] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)

    def ready(self) -> list[WorkerRecord]:
        """Returns the responsive workers in phase READY, in the order in which they became ready."""
        found = [worker for worker in self.workers.values() if worker.phase is WorkerPhase.READY and worker.is_here]
        return sorted(found, key=lambda worker: worker.ready_s)

    def begun(self) -> int:
        """Returns the number of reachable machines that have started their workers."""
        return sum(machine.has_begun and machine.is_reachable for machine in self.machines.values())

    def expected(self) -> int:
        """Returns the number of workers that the reachable, started machines keep running."""
        return sum(machine.slots for machine in self.machines.values() if machine.has_begun and machine.is_reachable)

    def can_grow(self) -> bool:
        """Returns whether a worker is running outside all views or may still be started."""
        if any(machine.slots and machine.replaces and machine.is_reachable for machine in self.machines.values()):
            return True
        outside = (WorkerPhase.OUTSIDE, WorkerPhase.READY)
        return any(worker.lives and worker.phase in outside for worker in self.workers.values())
