"""Data classes for a snapshot of a job: each rank's calls, stack and process. All times refer to one clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class CallSignature:
    """Arguments of a call, which must match on all ranks. Only messages have a `peer` (otherwise -1) and a `tag`."""

    operation: str
    dtype: str = ""
    count: int = 0
    reduction: str = ""
    root: int = -1
    peer: int = -1
    tag: int = 0

    def __str__(self) -> str:
        parts = [self.dtype, str(self.count) if self.dtype or self.count else ""]
        parts += [self.reduction if self.reduction not in ("", "SUM") else ""]
        parts += [f"root {self.root}" if self.root >= 0 else "", f"peer {self.peer}" if self.peer >= 0 else ""]
        parts += [f"tag {self.tag}" if self.tag else ""]
        return f"{self.operation}({', '.join(part for part in parts if part)})"


@dataclass(frozen=True)
class RankCall:
    """A call made by a rank in a group.

    Attributes:
        group: the identity of the group, the same on all its ranks. Error messages use `GroupMembership.name` instead.
        sequence: the number of the call in the group, from 1; 0 for messages and for the formation of the group.
        header: the arguments of the call.
        arrived_s: the time at which the rank made the call.
        ended_s: the time at which the call ended, or None.
        outcome: an element of `paceline.comm.record.layout.OUTCOMES`; empty until the call has ended.
        step: the training step in which the call was made, or None.
        all_arrived_s: the time at which this rank detected that all ranks had arrived, or None.
        missing: the ranks in the group that had not arrived when the call failed.
        tcp_nbytes: the number of bytes that the rank sent over the network for the call.
        line: the line of the user's program that made the call, such as "train.py:71"; "" if unknown.
        device: the type of device that runs the call, such as "cuda"; "" for the CPU.
        reached_s: the time at which the device reached the call, having completed all earlier work; None if the device
            has not reached the call.
    """

    group: str
    sequence: int
    header: CallSignature
    arrived_s: float
    ended_s: float | None = None
    outcome: str = ""
    step: int | None = None
    all_arrived_s: float | None = None
    missing: tuple[int, ...] = ()
    tcp_nbytes: int = 0
    line: str = ""
    device: str = ""
    reached_s: float | None = None

    @property
    def ready_s(self) -> float:
        """The time at which the rank made the call or, for a call on a device, at which the device reached the call."""
        return self.arrived_s if self.reached_s is None else max(self.arrived_s, self.reached_s)

    @property
    def is_open(self) -> bool:
        """Whether the call is still running or has failed."""
        return self.ended_s is None or self.outcome not in ("", "ok")

    @property
    def is_formation(self) -> bool:
        """Whether this is the formation of a group."""
        return self.sequence == 0 and not self.is_message

    @property
    def is_message(self) -> bool:
        """Whether the call is a send or a receive."""
        return self.header.peer >= 0

    def __str__(self) -> str:
        return f"{self.header} call {self.sequence}" if self.sequence else f"{self.header}"


@dataclass(frozen=True)
class Frame:
    """A frame of a Python stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class StackLocation:
    """A rank's location in the program.

    Attributes:
        what: the function that the rank is executing, such as `DataLoader.__next__`; empty at module level.
        line: the innermost line in the user's program, such as `train.py:71`; empty if there is none.
        is_loader: whether the rank is waiting for data.
        is_call: whether the rank is inside a Paceline or torch.distributed call.
        activity: what the library function does, such as "compiles"; "" if unknown.
    """

    what: str = ""
    line: str = ""
    is_loader: bool = False
    is_call: bool = False
    activity: str = ""

    def __str__(self) -> str:
        if not self.what:
            return f"at {self.line}" if self.line else "at an unknown location"
        return f"in {self.what} ({self.line})" if self.line else f"in {self.what}"


class ProcessState(Enum):
    """State of a process, as the kernel reports it."""

    RUNS = "runs"
    SLEEPS = "sleeps"
    WAITS_FOR_DISK = "waits for a disk"
    STOPPED = "is stopped by a signal"
    TRACED = "is held by a debugger"
    FROZEN = "is frozen by its cgroup"
    SWAPS = "waits for memory that was swapped out"
    ENDED = "has ended"


# States in which a process cannot make progress.
STILL = (ProcessState.STOPPED, ProcessState.TRACED, ProcessState.FROZEN, ProcessState.SWAPS)


@dataclass(frozen=True)
class ProcessActivity:
    """Activity of a process between two samples.

    Attributes:
        state: the process's state at the second sample.
        cores: the average number of cores that the process and its children used.
        disk_bytes_s: the rate at which the process and its children read and wrote files, in bytes per second.
        waited_share: the fraction of time during which computing threads were runnable but had no core.
        moves: whether the process's stack changed.
        child: the name of a child process that started or exited, such as "cc1plus", or "".
        wakes_hz: the number of times per second that the main thread went to sleep.
        reads_stdin: whether the main thread was waiting for standard input in both samples.
    """

    state: ProcessState
    cores: float = 0.0
    disk_bytes_s: float = 0.0
    waited_share: float = 0.0
    moves: bool = False
    child: str = ""
    wakes_hz: float = 0.0
    reads_stdin: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether the process is working.

        A working process uses a core or a disk, waits for a core, changes its stack, or starts other programs.
        """
        is_at_disk = self.disk_bytes_s >= 1 << 17 or self.state is ProcessState.WAITS_FOR_DISK
        is_at_work = self.cores + self.waited_share >= 0.2 or (self.state is ProcessState.RUNS and not self._only_polls)
        return is_at_work or is_at_disk or self.moves or bool(self.child)

    @property
    def _only_polls(self) -> bool:
        """Whether the main thread mostly sleeps and hardly computes, so that it was runnable only by chance."""
        return self.wakes_hz >= 1 and self.cores + self.waited_share < 0.05

    def is_busy_at(self, place: StackLocation) -> bool:
        """Returns True if the process is working. Less activity is required while it compiles, for example."""
        works_a_little = self.cores + self.waited_share >= 0.01 and place.activity in (
            "compiles",
            "waits for a child process",
        )
        return self.is_busy or works_a_little or (self.wakes_hz >= 5 and place.activity == "uses the network")


class ExitReason(Enum):
    """The reason why a rank exited."""

    FINISHED = "its script has ended"
    EXCEPTION = "an exception"
    KILLED = "a signal"
    OUT_OF_MEMORY = "out of memory"
    EXITED = "an exit code"
    MISMATCH = "an error because calls do not match"
    CONSEQUENCE = "an error that another rank caused"


@dataclass(frozen=True)
class DevicePhase:
    """The phase of a training step that a device is executing, such as `backward`.

    Attributes:
        name: the name of the phase.
        step: the number of the training step, or None.
        since_s: the time at which the device began the phase.
    """

    name: str
    step: int | None
    since_s: float


@dataclass(frozen=True)
class StoreWait:
    """A wait of a rank's main thread for keys in a store.

    Attributes:
        method: the method of the store, such as "get".
        keys: the keys as formatted for a message, such as `'ready'`; "" if they are unknown.
        count: the number of keys.
        since_s: the time at which the wait began.
    """

    method: str
    keys: str
    count: int
    since_s: float

    def __str__(self) -> str:
        if not self.keys:
            return f"store.{self.method}"
        unset = "which no rank has set" if self.count == 1 else "of which at least one has not been set"
        return f"store.{self.method} for the key{'s' if self.count > 1 else ''} {self.keys}, {unset}"


@dataclass(frozen=True)
class RankExitStatus:
    """Description of a rank's exit.

    Attributes:
        manner: the category of the exit.
        at_s: the time of the exit.
        how: a short description of the exit.
        line: the line in the user's program that raised an exception or exited, or "".
        handled: the exception that was being handled when the rank's final exception was raised, or "".
    """

    manner: ExitReason
    at_s: float
    how: str = ""
    line: str = ""
    handled: str = ""


@dataclass(frozen=True)
class GroupMembership:
    """A rank's membership in a group.

    Attributes:
        number: the rank's number in the group.
        size: the number of members.
        name: the name of the group in error messages.
        ranks: the members' numbers in the job, ordered by group rank; only given while the rank is waiting for the
            group to form.
        is_closed: whether the rank has destroyed the group.
        has_job_ranks: whether the rank of each member in the group is also its rank in the job.
    """

    number: int
    size: int
    name: str = ""
    ranks: tuple[int, ...] = ()
    is_closed: bool = False
    has_job_ranks: bool = False


@dataclass(frozen=True)
class PeerTraffic:
    """Traffic from one rank to another, as measured by the kernel.

    Attributes:
        peer: the other rank's number in the job.
        sent_nbytes: the number of bytes that the peer received.
        active_s: the time during which data was in flight and the peer's receive buffer was not full.
        segments, retransmits: the numbers of segments sent and retransmitted.
        round_trip_s: the smoothed round-trip time.
        silent_s: the time that an acknowledgment had been outstanding when the traffic was measured.
    """

    peer: int
    sent_nbytes: int
    active_s: float
    segments: int = 0
    retransmits: int = 0
    round_trip_s: float = 0.0
    silent_s: float = 0.0


@dataclass(frozen=True)
class RankState:
    """The known state of one rank.

    Attributes:
        rank: the rank's number in the job.
        memberships: the rank's memberships, keyed by group identity.
        calls: the rank's latest calls, oldest first; empty if the recording is missing.
        step: the rank's current training step, or None.
        since_s: the time of the rank's last recorded activity, or None.
        place: the location of the main thread, or None.
        process: the activity of the process, or None.
        ending: the rank's exit status, or None while it runs.
        data_s: the time that the rank has spent waiting for data, in seconds.
        links: the rank's traffic to ranks on other hosts.
        phase: the phase that the rank's device is executing, or None.
        store_wait: the store's keys for which the rank is waiting, or None.
        thread_error: the exception that ended one of the rank's threads, with its line, or "".
    """

    rank: int
    host: str = ""
    pid: int = 0
    memberships: Mapping[str, GroupMembership] = field(default_factory=dict)
    calls: tuple[RankCall, ...] = ()
    step: int | None = None
    since_s: float | None = None
    place: StackLocation | None = None
    process: ProcessActivity | None = None
    ending: RankExitStatus | None = None
    data_s: float = 0.0
    links: tuple[PeerTraffic, ...] = ()
    phase: DevicePhase | None = None
    store_wait: StoreWait | None = None
    thread_error: str = ""

    @property
    def manner(self) -> ExitReason | None:
        """The reason of the rank's exit, or None while it runs."""
        return None if self.ending is None else self.ending.manner

    @property
    def latest_call(self) -> RankCall | None:
        """The call that the rank made last, or None if no call is known."""
        return max(self.calls, key=lambda call: call.arrived_s, default=None)


@dataclass(frozen=True)
class JobSnapshot:
    """The state of a job at `now_s`. Ranks with an unknown state may be missing; `word` is "rank" or "worker"."""

    now_s: float
    ranks: tuple[RankState, ...]
    word: str = "rank"

    @property
    def by_rank(self) -> dict[int, RankState]:
        """The states, keyed by rank."""
        return {rank.rank: rank for rank in self.ranks}


def is_idle(rank: RankState) -> bool:
    """Returns True if the rank is running and has made calls, but is now neither in a call nor working."""
    if rank.process is None or rank.ending is not None or rank.phase is not None or not rank.calls:
        return False
    is_in_call = any(call.ended_s is None for call in rank.calls)
    return not is_in_call and not rank.process.is_busy_at(rank.place or StackLocation())
