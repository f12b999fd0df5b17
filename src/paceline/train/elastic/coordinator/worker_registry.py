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
    """A machine whose launcher has joined the job.

    Attributes:
        name: The machine's name, unique in the job.
        host: The host name, for error messages.
        slots: The number of workers that the launcher keeps running.
        has_begun: Whether the launcher has been ordered to start its workers.
        replaces: Whether the launcher replaces workers that exit.
        listed: The workers reported since the machine reconnected, or None if all have been reported.
        lost_s: The time of the last contact, if the machine is unreachable.
        address: The address at which other launchers reach the launcher.
        known: The generation of the latest view that the launcher has confirmed.
        replicated: The job state that was last replicated to the launcher.
        has_left: Whether the launcher has exited.
        has_announced_end: Whether the launcher itself announced its exit, which implies that its workers have exited.
        is_leaving: Whether the launcher will exit as soon as its workers have exited.
        store: The store for the members' rendezvous if this launcher is the coordinator.
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
        machine: The machine on which the worker runs.
        fingerprint: A string that is identical on all workers whose results are bitwise equal.
        ready_s: The time at which the worker became ready.
        learns: Whether the worker can catch up while others train (see `membership_rules.py`).
        has_caught_up: Whether the worker has caught up.
        transfer: The state transfer to the worker, or None.
        refusals: The names of the senders that cannot serve the transfer.
        offers: The senders' offers that were passed on to the worker.
        since: The generation of the view in which the worker last became a member.
        installed: The generation of the latest view that the worker has entered.
        has_state: Whether the worker has entered a view that contains it, and therefore holds the job's state.
        leaving: The reason why the worker was asked to exit, or None.
        has_finished: Whether the worker's training loop has completed.
        stalled: The reason why the launcher considers the worker unresponsive, or None.
        is_fenced: Whether the launcher was ordered to kill the worker because it is stalled.
        ended: A description of the worker's exit, or None while the worker is running.
        was_drained: Whether all messages that the worker sent before its exit have been received.
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
