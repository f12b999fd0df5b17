"""The reports of nodes and the orders to them. `framing.py` says how they travel.

How messages travel between launchers: each is a length, then JSON. Nothing that is received is executed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import get_args

from paceline import __version__
from paceline.comm.security.untrusted_peers import decode_untrusted, encodable
from paceline.operate.launch.workers.failures import Record, WorkerFailure


@dataclass(frozen=True)
class JoinJob:
    """A node asks to take part.

    Should rank 0 run there, it serves torch's store at `port` and Paceline's at `store_port`.
    """

    host: str
    pid: int
    address: str
    port: int
    workers: int
    role: str = "default"
    node_rank: int | None = None
    serves: bool = False
    version: str = ""  # Paceline's version; versions before 0.1.0 do not send it
    is_elastic: bool = False
    listens: str = ""  # in an elastic job: where other launchers reach this one, should it have to coordinate
    number: int = -1  # of the machine, if it takes part already; a Follow comes next
    store_port: int = 0
    job: str = ""  # in an elastic job: the one that it was told to join, by its identity


@dataclass(frozen=True)
class Failed:
    """The first worker of the node to fail in this generation; the node is ending the others."""

    generation: int
    failure: WorkerFailure


@dataclass(frozen=True)
class WorkersFinished:
    """All workers of the node have ended without a failure."""

    generation: int


@dataclass(frozen=True)
class Stopped:
    """None of the node's workers runs any more; `port` and `store_port` are for the next generation, as in `Join`."""

    generation: int
    port: int
    failures: tuple[WorkerFailure, ...] = ()
    store_port: int = 0


@dataclass(frozen=True)
class Leave:
    """The node was stopped by its user or scheduler, its workers have ended."""

    reason: str


@dataclass(frozen=True)
class Departing:
    """In an elastic job: the node ends as soon as its workers have; then it leaves, or hands over if it coordinates."""


@dataclass(frozen=True)
class WorkerStarted:
    """In an elastic job: a worker runs."""

    uid: str


@dataclass(frozen=True)
class WorkerStalled:
    """In an elastic job: a worker is stopped; once it is continued, a WorkerStarted comes."""

    uid: str
    why: str


@dataclass(frozen=True)
class WorkerExited:
    """In an elastic job: a worker has ended, and all that it said has been reported; `how` is for the user."""

    uid: str
    how: str
    exit_code: int


@dataclass(frozen=True)
class WorkerMessage:
    """In an elastic job: a message of a worker, as JSON."""

    uid: str
    body: str


@dataclass(frozen=True)
class Slots:
    """In an elastic job: how many of the node's slots have a worker or will have one, and why others were given up."""

    count: int
    failures: tuple[WorkerFailure, ...] = ()


@dataclass(frozen=True)
class Follow:
    """In an elastic job: a machine that takes part already follows this launcher from now on; its report, as JSON.

    `failures` are those that it has reported, or was told to remember.
    """

    body: str
    failures: tuple[WorkerFailure, ...] = ()


@dataclass(frozen=True)
class Running:
    """In an elastic job: tells a launcher where the machines meet that a job runs already.

    `job` is its identity; `address` is that of the launcher that coordinates it, empty while its launchers look for
    another. The answer is an Answered from a launcher that takes part in that job, and nothing from another one.
    """

    job: str
    address: str = ""


@dataclass(frozen=True)
class StateReplicated:
    """In an elastic job: the node has taken in a Know, with views up to that number."""

    generation: int


@dataclass(frozen=True)
class SnapshotReport:
    """What is seen of the node's workers, as JSON of `operate/diagnosis/machine_snapshot.py`.

    The node sends it when a call lasts too long, when a worker fails, when it is ordered to look, when its calls go on
    (then `body` is empty), and when its workers have ended.
    """

    body: str
    is_last: bool = False  # the workers have ended
    is_failure: bool = False  # a worker has failed, here or where the order to look came from


@dataclass(frozen=True)
class DashboardWatched:
    """Whether somebody looks at the live page: from the node that has it, and to the others."""

    is_on: bool


@dataclass(frozen=True)
class AskStacks:
    """Take the stacks of the workers, and send them as `Seen`: from the node that has the page, and to the others."""


@dataclass(frozen=True)
class DashboardUpdate:
    """What a node sees of its ranks and what they print, as JSON of `operate/launch/job_dashboard.py`, for the node with the page."""

    body: str


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life in either direction, with no news."""


@dataclass(frozen=True)
class AskTime:
    """The node asks what time it is where the meeting is served; `asked_ns` is its own CLOCK_MONOTONIC."""

    asked_ns: int


@dataclass(frozen=True)
class TellTime:
    """The answer to `AskTime`: `told_ns` is CLOCK_MONOTONIC where the meeting is served."""

    asked_ns: int
    told_ns: int


@dataclass(frozen=True)
class Start:
    """Start the workers of a generation: those of this node are ranks `first_rank` and following."""

    generation: int
    restart_count: int
    max_restarts: int
    run_id: str
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    role_first_rank: int
    role_world_size: int
    master_addr: str
    master_port: int
    hosts: tuple[str, ...] = ()  # of all nodes, in the order of their ranks
    store_port: int = 0  # of Paceline's store at `master_addr`; 0 on a single machine


@dataclass(frozen=True)
class Stop:
    """End the workers and report `Stopped`."""

    generation: int
    reason: str
    is_failure: bool = False  # then the workers get a moment to report what the failure meant for them


@dataclass(frozen=True)
class WaitOrder:
    """There is nothing to do yet; the reason is for the user."""

    reason: str


@dataclass(frozen=True)
class StartSlots:
    """In an elastic job: start a worker in each slot; those of this node are `first_slot` and following.

    `machine` is the node's number, unique in the job for ever. `store` is where the workers' store is served; it is
    empty if the node is to serve one for itself.
    """

    machine: int
    first_slot: int
    slots: int  # of all nodes that are there
    run_id: str
    store: str = ""


@dataclass(frozen=True)
class TellWorker:
    """In an elastic job: a message for a worker, as JSON."""

    uid: str
    body: str


@dataclass(frozen=True)
class FenceOrder:
    """In an elastic job: kill a worker that is stopped, since the others go on without it."""

    uid: str


@dataclass(frozen=True)
class StopReplacement:
    """In an elastic job: start no further worker; those that run go on."""

    reason: str


@dataclass(frozen=True)
class ReplicateState:
    """In an elastic job: what the node has to know in case that it coordinates the job one day, as JSON."""

    body: str


@dataclass(frozen=True)
class Remember:
    """In an elastic job: failures that the user is shown at the end; the next coordinator has to be told of them."""

    failures: tuple[WorkerFailure, ...]


@dataclass(frozen=True)
class FollowLauncher:
    """In an elastic job: the node follows the launcher of machine `number` from now on, or stands if that is itself."""

    number: int
    address: str


@dataclass(frozen=True)
class Answered:
    """In an elastic job: whether the node may follow this launcher, or whom this one follows, -1 if nobody.

    With `is_stranger` this launcher takes no part in the node's job, so the one that was there before has ended.
    """

    is_welcome: bool
    number: int
    address: str = ""
    is_stranger: bool = False


@dataclass(frozen=True)
class Moved:
    """In an elastic job: this job gives way to another, which runs already; join that one at `address`."""

    job: str
    address: str


@dataclass(frozen=True)
class Dropped:
    """The server goes on without the node, or serves no more; it closes the connection, and has not ended."""


@dataclass(frozen=True)
class RequestSnapshot:
    """Report a `Sighting`, since another node's workers make no progress, or one of them has failed."""

    is_failure: bool = False
    is_deep: bool = False  # a worker has failed since its calls did not fit, and only many calls tell why


@dataclass(frozen=True)
class UserMessage:
    """What is wrong with the job, for the user.

    Attributes:
        text: a sentence.
        is_last: whether it is shown after the report of the failures.
        is_stall: whether it says why the job makes no progress, and blames the ranks in `blamed`.
    """

    text: str
    is_last: bool = False
    is_stall: bool = False
    blamed: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobEnded:
    """The job is over; `code` is for the shell."""

    code: int
    reason: str = ""
    failures: tuple[WorkerFailure, ...] = ()


Report = (
    JoinJob
    | Failed
    | WorkersFinished
    | Stopped
    | Leave
    | Departing
    | Heartbeat
    | AskTime
    | WorkerStarted
    | WorkerStalled
    | WorkerExited
    | WorkerMessage
    | Slots
    | Follow
    | Running
    | StateReplicated
    | SnapshotReport
    | DashboardWatched
    | AskStacks
    | DashboardUpdate
)
Order = (
    Start
    | Stop
    | WaitOrder
    | JobEnded
    | Heartbeat
    | TellTime
    | StartSlots
    | TellWorker
    | FenceOrder
    | StopReplacement
    | ReplicateState
    | Remember
    | FollowLauncher
    | Answered
    | Moved
    | Dropped
    | RequestSnapshot
    | UserMessage
    | DashboardWatched
    | AskStacks
    | DashboardUpdate
)
Message = Report | Order


LARGEST = 1 << 22
_BEYOND = 1 << 63  # what this many is, neither the system nor struct can take
_LONGEST_SHOWN = 100  # of a value in an error
_LENGTH = struct.Struct("<I")

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (*get_args(Report), *get_args(Order))}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "str | None": (str, type(None)),
    "bool": bool,
    "int | None": (int, type(None)),
    "float": (float, int),
}


class MessageError(ValueError):
    """The peer sent something that is not a message."""


def encode(message: Message) -> bytes:
    """Returns the message after its length."""
    body = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
    if len(body) > LARGEST:
        raise MessageError(f"a message of {len(body)} bytes is larger than {LARGEST}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Returns the message in `body`.

    Raises:
        MessageError: `body` is no message, or a field has another type or a number that nothing can be counted with.
    """
    try:
        content = decode_untrusted(json.loads, body)
        kind = _KINDS[content.pop("kind")]
        known = {each.name: str(each.type) for each in fields(kind)}
        if kind is JoinJob and content.get("version") != __version__:  # to be refused with the reason, whatever it says
            content = {name: value for name, value in content.items() if name in known}
        values = {name: _value(known[name], value) for name, value in content.items()}
        make: Callable[..., Message] = kind
        return make(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MessageError(f"not a message of a launcher ({type(error).__name__}: {error})") from error


def _value(kind: str, value: object) -> object:
    if kind == "Failure":
        return _failure(value)
    if kind.startswith("tuple") and isinstance(value, list):
        inner = kind.removeprefix("tuple[").partition(",")[0].rstrip("]")
        return tuple(_value(inner, each) for each in value)
    expected = _TYPES.get(kind)
    if expected is None or not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        raise TypeError(f"{_shown(value)} is not {kind}")
    if isinstance(value, (int, float)) and not (math.isfinite(value) and -_BEYOND <= value < _BEYOND):
        raise ValueError(f"{_shown(value)} is out of range")
    return encodable(value) if isinstance(value, str) else value


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, (list, dict)) else repr(value)[:_LONGEST_SHOWN]


def _failure(value: object) -> WorkerFailure:
    content = _dict(value)
    record = content.pop("record")
    known = {each.name: str(each.type) for each in fields(WorkerFailure)}
    values = {name: _value(known[name], each) for name, each in content.items()}
    make: Callable[..., WorkerFailure] = WorkerFailure
    return make(**values, record=None if record is None else _record(record))


def _record(value: object) -> Record:
    known = {each.name: str(each.type) for each in fields(Record)}
    make: Callable[..., Record] = Record
    return make(**{name: _value(known[name], each) for name, each in _dict(value).items()})


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{_shown(value)} is not an object")
    return value


@dataclass
class Inbox:
    """Splits the received bytes into messages."""

    received: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Message]:
        """Takes more bytes; returns the messages that are complete.

        Raises:
            MessageError: the bytes are no message.
        """
        self.received += data
        messages = []
        while len(self.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self.received)
            if length > LARGEST:
                raise MessageError(f"a message of {length} bytes is larger than {LARGEST}")
            if len(self.received) < _LENGTH.size + length:
                break
            body = bytes(self.received[_LENGTH.size : _LENGTH.size + length])
            del self.received[: _LENGTH.size + length]
            messages.append(decode(body))
        return messages
