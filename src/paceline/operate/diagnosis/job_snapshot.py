"""What is known of a job at one moment, as data: each rank's calls, stack and process. All times are of one clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class CallSignature:
    """What a rank says of a call to the others, who must say the same; `peer` is set for messages only."""

    operation: str
    dtype: str = ""
    count: int = 0
    reduction: str = ""
    root: int = -1
    peer: int = -1

    def __str__(self) -> str:
        parts = [self.dtype, str(self.count) if self.dtype or self.count else ""]
        parts += [self.reduction if self.reduction not in ("", "SUM") else ""]
        parts += [f"root {self.root}" if self.root >= 0 else "", f"peer {self.peer}" if self.peer >= 0 else ""]
        return f"{self.operation}({', '.join(part for part in parts if part)})"


@dataclass(frozen=True)
class RankCall:
    """A call of a rank in a group.

    Attributes:
        group: what the group is called on all of its ranks; `Seat.name` is for people.
        sequence: counts the calls of the group.
        arrived_s: when the rank made the call.
        ended_s: when it was over; None while it is not.
        outcome: how it ended, as a word of `paceline.comm.record.layout.OUTCOMES`; empty while it has not.
        step: the step of the training loop in which it was made, if the loop says.
        come_s: when all ranks of the group had come, as far as this rank noticed.
        missing: the numbers in the group of those that had not come when the call failed.
        tcp_nbytes: what the rank sent over the network for it.
    """

    group: str
    sequence: int
    header: CallSignature
    arrived_s: float
    ended_s: float | None = None
    outcome: str = ""
    step: int | None = None
    come_s: float | None = None
    missing: tuple[int, ...] = ()
    tcp_nbytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it has no result: it is not over, or ended in an error."""
        return self.ended_s is None or self.outcome not in ("", "ok")

    @property
    def is_message(self) -> bool:
        """Whether it concerns one other rank only."""
        return self.header.peer >= 0

    def __str__(self) -> str:
        return f"{self.header}" if self.is_message else f"{self.header} call {self.sequence}"


@dataclass(frozen=True)
class Frame:
    """A frame of Python."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class StackLocation:
    """Where a rank is in its program.

    Attributes:
        what: what it executes, such as `DataLoader.__next__` or the function's name; empty at a module's level.
        line: the user's own line that led there, such as `train.py:71`; empty if there is none.
        is_loader: whether it waits for data.
        is_call: whether it is in a call of Paceline or torch.distributed.
    """

    what: str = ""
    line: str = ""
    is_loader: bool = False
    is_call: bool = False

    def __str__(self) -> str:
        if not self.what:
            return f"at {self.line}" if self.line else "in a place that is not known"
        return f"in {self.what} ({self.line})" if self.line else f"in {self.what}"


class ProcessState(Enum):
    """What the kernel says of a process."""

    RUNS = "runs"
    SLEEPS = "sleeps"
    WAITS_FOR_DISK = "waits for a disk"
    STOPPED = "is stopped by a signal"
    TRACED = "is held by a debugger"
    FROZEN = "is frozen by its cgroup"
    SWAPS = "waits for memory that was swapped out"
    ENDED = "has ended"


STILL = (
    ProcessState.STOPPED,
    ProcessState.TRACED,
    ProcessState.FROZEN,
    ProcessState.SWAPS,
)  # a process in such a state does nothing


@dataclass(frozen=True)
class ProcessActivity:
    """A process between two looks at it.

    Attributes:
        state: what the kernel said at the second look.
        cores: how many cores it and its children used in between.
        disk_bytes_s: how much they read from and wrote to disks.
        waited_share: for how much of the time it was ready to run and had no core.
        moves: whether its stack changed.
    """

    state: ProcessState
    cores: float = 0.0
    disk_bytes_s: float = 0.0
    waited_share: float = 0.0
    moves: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether it does something that takes its time: computes, or would if it had a core, reads or writes."""
        is_at_disk = self.disk_bytes_s >= 1 << 17 or self.state is ProcessState.WAITS_FOR_DISK
        return self.cores + self.waited_share >= 0.2 or self.state is ProcessState.RUNS or is_at_disk or self.moves


class ExitReason(Enum):
    """How a rank ended."""

    FINISHED = "its script has ended"
    EXCEPTION = "an exception"
    KILLED = "a signal"
    OUT_OF_MEMORY = "out of memory"
    EXITED = "an exit code"
    MISMATCH = "an error, since calls do not fit together"
    CONSEQUENCE = "an error that another rank caused"


@dataclass(frozen=True)
class RankExitStatus:
    """How and when a rank ended; `how` says it in a few words, `line` is the user's line of an exception."""

    manner: ExitReason
    at_s: float
    how: str = ""
    line: str = ""


@dataclass(frozen=True)
class GroupMembership:
    """A rank's place in a group: its number there, how many there are, and the group's name for people."""

    number: int
    size: int
    name: str = ""


@dataclass(frozen=True)
class PeerTraffic:
    """What a rank's connections to another one carried, as the kernel measured it.

    Attributes:
        peer: the other rank's number in the job.
        sent_nbytes: how much arrived there.
        active_s: for how long data was under way while the other rank had room for it.
        segments: how many were sent; `retransmits` how many of them again.
        round_trip_s: the usual one.
        silent_s: for how long the other host had owed an answer when this was measured.
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
    """What is known of one rank.

    Attributes:
        rank: its number in the job.
        seats: its groups.
        calls: its latest calls, oldest first. It is empty if its recording is missing.
        step: the step that it is in, if its loop says.
        since_s: since when nothing was recorded of it.
        place: where its main thread is.
        data_s: how long it has waited for its data.
        links: its connections to ranks on other hosts.
    """

    rank: int
    host: str = ""
    pid: int = 0
    seats: Mapping[str, GroupMembership] = field(default_factory=dict)
    calls: tuple[RankCall, ...] = ()
    step: int | None = None
    since_s: float | None = None
    place: StackLocation | None = None
    process: ProcessActivity | None = None
    ending: RankExitStatus | None = None
    data_s: float = 0.0
    links: tuple[PeerTraffic, ...] = ()


@dataclass(frozen=True)
class JobSnapshot:
    """All that is known at `now_s`; a rank of which nothing is known may be missing in `ranks`."""

    now_s: float
    ranks: tuple[RankState, ...]
    word: str = "rank"
