"""The coordinator's records of the machines and workers in an elastic job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.train.elastic.protocol import ReplicatedJobState, StateTransfer, TransferOffer


class WorkerPhase(Enum):
    """The phase of a worker's membership."""

    OUTSIDE = auto()  # the worker has not requested to join since it started or was excluded from a view
    READY = auto()  # the worker has requested to join
    MEMBER = auto()  # the worker is in a valid view
    DISMISSED = auto()  # the worker was ordered to exit


@dataclass(eq=False)
class MachineRecord:
    """A machine whose launcher has joined the job."""

    name: str  # unique in the job
    host: str  # for error messages
    slots: int  # the number of workers that the launcher keeps running
    is_reachable: bool = True
    has_begun: bool = False  # whether the launcher has been ordered to start its workers
    replaces: bool = True  # whether the launcher replaces workers that exit
    listed: set[str] | None = None  # the workers reported since the machine reconnected; None if all have been reported
    lost_s: float = 0.0  # the time of the last contact, if the machine is unreachable
    address: str = ""  # the address at which other launchers reach the launcher
    known: int = 0  # the generation of the latest view that the launcher has confirmed
    replicated: ReplicatedJobState | None = None  # the job state that was last replicated to the launcher
    has_left: bool = False  # whether the launcher has exited
    has_announced_end: bool = False  # whether it announced its exit, which implies that its workers have exited
    is_leaving: bool = False  # whether the launcher will exit as soon as its workers have exited
    store: str = ""  # the store for the members' rendezvous if this launcher is the coordinator


@dataclass(eq=False)
class WorkerRecord:
    """A worker process."""

    uid: str  # unique in the job
    machine: MachineRecord
    phase: WorkerPhase = WorkerPhase.OUTSIDE
    fingerprint: str = ""  # identical on all workers whose results are bitwise equal
    ready_s: float = 0.0  # the time at which the worker became ready
    can_catch_up: bool = False  # whether the worker can catch up while others train (see `membership_rules.py`)
    has_caught_up: bool = False
    transfer: StateTransfer | None = None  # the state transfer to the worker
    refusals: set[str] = field(default_factory=set)  # the names of the senders that cannot serve the transfer
    offers: list[TransferOffer] = field(default_factory=list)  # the senders' offers that were passed on to the worker
    since: int = 0  # the generation of the view in which the worker last became a member
    installed: int = 0  # the generation of the latest view that the worker has entered
    has_state: bool = False  # whether it has entered a view that contains it, and therefore holds the job's state
    leaving: str | None = None  # the reason why the worker was asked to exit
    has_finished: bool = False  # whether the worker's training loop has completed
    stalled: str | None = None  # the reason why the launcher considers the worker unresponsive
    is_fenced: bool = False  # whether the launcher was ordered to kill the worker because it is stalled
    ended: str | None = None  # a description of the worker's exit
    exit_code: int = 0
    was_drained: bool = True  # whether all messages that the worker sent before its exit have been received

    @property
    def lives(self) -> bool:
        """Whether the worker is still considered to be running."""
        return self.ended is None

    @property
    def is_here(self) -> bool:
        """Whether the worker is running and responsive."""
        return self.ended is None and self.machine.is_reachable and self.stalled is None

    @property
    def trains(self) -> bool:
        """Whether the worker is a member that can continue training."""
        return self.phase is WorkerPhase.MEMBER and self.is_here and not self.has_finished

    @property
    def may_return(self) -> bool:
        """Whether the worker is a member that cannot continue now but may do so later."""
        return self.phase is WorkerPhase.MEMBER and self.ended is None and not self.is_here and not self.has_finished

    @property
    def is_stopped(self) -> bool:
        """Whether the worker is unresponsive on a reachable machine, for example after SIGSTOP."""
        return self.ended is None and self.machine.is_reachable and self.stalled is not None

    def loses_state(self) -> None:
        """Records that the worker must request to join again. Transfers that were begun for it earlier are obsolete."""
        self.phase, self.has_state = WorkerPhase.OUTSIDE, False
        self.transfer, self.has_caught_up = None, False

    def runs(self) -> None:
        """Records that the worker is responsive."""
        self.stalled, self.is_fenced = None, False

    @property
    def has_left_well(self) -> bool:
        """Whether the worker was asked to exit and did so with code 0."""
        return self.ended is not None and self.leaving is not None and self.exit_code == 0

    @property
    def absence(self) -> str:
        """The reason for the worker's absence, for error messages."""
        if self.ended is not None:
            return f"worker {self.uid} on {self.machine.host} has ended ({self.ended})"
        if not self.machine.is_reachable:
            return f"{self.machine.host}, with worker {self.uid}, cannot be reached"
        if self.stalled is not None:
            return f"worker {self.uid} on {self.machine.host} does not answer ({self.stalled})"
        return f"worker {self.uid} on {self.machine.host} has not reached the others"


@dataclass
class WorkerRegistry:
    """All machines and workers in the job, including those that have exited."""

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
        """Returns True if a worker is running outside all views or may still be started."""
        if any(machine.slots and machine.replaces and machine.is_reachable for machine in self.machines.values()):
            return True
        outside = (WorkerPhase.OUTSIDE, WorkerPhase.READY)
        return any(worker.lives and worker.phase in outside for worker in self.workers.values())
