"""The reports of nodes, the orders to them, and their encoding: a length, followed by JSON.

Each report and each order is one frozen msgspec struct, so the declarations below also validate everything that is
received: a frame that does not match them raises `MessageError`, and no received data is executed. The orders of an
elastic job's coordinator and the messages of its workers (`train/elastic/protocol.py`) are sent unchanged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from paceline import __version__
from paceline.comm.security.untrusted_peers import Int64, decode_untrusted, encodable
from paceline.operate.launch.workers.failures import WorkerFailure
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    FenceStalledOrder,
    FromWorker,
    MachineReport,
    NotifyOrder,
    ReplicateOrder,
    SendOrder,
)


class _NodeMessage(msgspec.Struct, frozen=True, tag_field="kind", tag=True, forbid_unknown_fields=True):
    """A report or an order."""


class JoinJob(_NodeMessage, frozen=True, tag="Join"):
    """A node requests to take part.

    The tags of this report and of `JobEnded` never change, so that a launcher of any other version receives the reason
    for its refusal.

    Attributes:
        host: The node's host name.
        pid: The process id of the node's launcher.
        address: The address by which other nodes reach the node.
        port: The port of torch's store, which the node serves if rank 0 runs there.
        workers: The number of the node's workers.
        role: The role of the node's workers, as in torchelastic.
        node_rank: The node's number in a static job, or None.
        serves: Whether the node serves the meeting.
        version: Paceline's version; versions before 0.1.0 do not send it.
        is_elastic: Whether the launcher was started with `--elastic`.
        listens: In an elastic job, the address at which other launchers reach this one if it coordinates.
        number: The number of the machine if it already takes part, in which case a Follow is sent next; otherwise -1.
        store_port: The port of Paceline's store, which the node serves if rank 0 runs there.
        job: In an elastic job, the identity of the job that the node was ordered to join, or "".
    """

    host: str
    pid: Int64
    address: str
    port: Int64
    workers: Int64
    role: str = "default"
    node_rank: Int64 | None = None
    serves: bool = False
    version: str = ""
    is_elastic: bool = False
    listens: str = ""
    number: Int64 = -1
    store_port: Int64 = 0
    job: str = ""


class _ForeignJoin(msgspec.Struct, frozen=True):
    """The part of a JoinJob of another version that its refusal needs."""

    kind: Literal["Join"]
    host: str = ""
    pid: Int64 = 0
    version: str = ""


class Failed(_NodeMessage, frozen=True):
    """The first worker of the node has failed in this generation; the node is ending the others."""

    generation: Int64
    failure: WorkerFailure


class WorkersFinished(_NodeMessage, frozen=True):
    """All workers of the node have ended without a failure."""

    generation: Int64


class Stopped(_NodeMessage, frozen=True):
    """None of the node's workers runs any more; the ports are for the next generation, as in `JoinJob`."""

    generation: Int64
    port: Int64
    failures: tuple[WorkerFailure, ...] = ()
    store_port: Int64 = 0


class Leave(_NodeMessage, frozen=True):
    """The node was stopped by its user or scheduler, and its workers have ended."""

    reason: str


class Departing(_NodeMessage, frozen=True):
    """In an elastic job: the node ends as soon as its workers have; then it leaves, or hands over if it coordinates."""


class WorkerStarted(_NodeMessage, frozen=True):
    """In an elastic job: a worker runs."""

    uid: str


class WorkerStalled(_NodeMessage, frozen=True):
    """In an elastic job: a worker is stopped. After it is continued, a WorkerStarted follows."""

    uid: str
    why: str


class WorkerExited(_NodeMessage, frozen=True):
    """In an elastic job: a worker has ended, and all its messages have been reported; `how` is for the user."""

    uid: str
    how: str
    exit_code: Int64


class WorkerMessage(_NodeMessage, frozen=True):
    """In an elastic job: a message of a worker."""

    uid: str
    message: FromWorker


class Slots(_NodeMessage, frozen=True):
    """In an elastic job: the number of the node's open slots, and the failures for which others were closed."""

    count: Int64
    failures: tuple[WorkerFailure, ...] = ()


class Follow(_NodeMessage, frozen=True):
    """In an elastic job: a machine that already takes part follows this launcher from now on.

    Attributes:
        report: The machine's report.
        failures: The failures that it has reported, or was ordered to remember.
    """

    report: MachineReport
    failures: tuple[WorkerFailure, ...] = ()


class Running(_NodeMessage, frozen=True):
    """In an elastic job: a notice to the launcher at the meeting's address that a job is already running.

    A launcher that takes part in that job replies with an Answered; any other launcher does not reply.

    Attributes:
        job: The identity of the job.
        address: The address of the launcher that coordinates it, or "" while its launchers search for another one.
    """

    job: str
    address: str = ""


class StateReplicated(_NodeMessage, frozen=True):
    """In an elastic job: the node holds the replicated state, with views up to that generation."""

    generation: Int64


class SnapshotReport(_NodeMessage, frozen=True):
    """A snapshot of the node's workers.

    The node sends it when a call takes too long, when a worker fails, when it is requested, when calls proceed again
    (then `body` is empty), and when its workers have ended.

    Attributes:
        body: The snapshot, encoded by `operate/diagnosis/machine_snapshot.py`.
        is_last: Whether the workers have ended.
        is_failure: Whether a worker has failed, on this node or on the one for which the snapshot was requested.
    """

    body: str
    is_last: bool = False
    is_failure: bool = False


class DashboardWatched(_NodeMessage, frozen=True):
    """Whether the live page has viewers: sent by the node that has it, and relayed to the others."""

    is_on: bool


class AskStacks(_NodeMessage, frozen=True):
    """A request for the workers' stacks in a DashboardUpdate, from the node with the page; relayed to the others."""


class DashboardUpdate(_NodeMessage, frozen=True):
    """The state and output of a node's ranks for the page, encoded by `operate/launch/job_dashboard.py`."""

    body: str


class Heartbeat(_NodeMessage, frozen=True):
    """A keep-alive message, sent in both directions."""


class AskTime(_NodeMessage, frozen=True):
    """A request for the time on the machine that serves the meeting; `asked_ns` is the node's own CLOCK_MONOTONIC."""

    asked_ns: Int64


class TellTime(_NodeMessage, frozen=True):
    """The reply to `AskTime`; `told_ns` is CLOCK_MONOTONIC on the machine that serves the meeting."""

    asked_ns: Int64
    told_ns: Int64


class Start(_NodeMessage, frozen=True):
    """Start the workers of a generation.

    Attributes:
        generation: The number of the generation.
        restart_count: The number of restarts so far.
        max_restarts: The maximum number of restarts.
        run_id: The name of the job.
        group_rank: The number of this node.
        group_world_size: The number of nodes.
        first_rank: The first rank of this node's workers.
        world_size: The number of workers.
        role_first_rank: The first rank of this node's workers within their role.
        role_world_size: The number of workers in that role.
        master_addr: The address of the node with rank 0.
        master_port: The port of torch's store there.
        hosts: The host names of all nodes, in the order of their ranks.
        store_port: The port of Paceline's store at `master_addr`; 0 on a single machine.
    """

    generation: Int64
    restart_count: Int64
    max_restarts: Int64
    run_id: str
    group_rank: Int64
    group_world_size: Int64
    first_rank: Int64
    world_size: Int64
    role_first_rank: Int64
    role_world_size: Int64
    master_addr: str
    master_port: Int64
    hosts: tuple[str, ...] = ()
    store_port: Int64 = 0


class Stop(_NodeMessage, frozen=True):
    """End the workers and report `Stopped`.

    After a failure (`is_failure`) the workers get a moment to report its consequences.
    """

    generation: Int64
    reason: str
    is_failure: bool = False


class StartSlots(_NodeMessage, frozen=True):
    """In an elastic job: start a worker in each slot.

    Attributes:
        machine: The number of the node's machine, which is never reused.
        first_slot: The number of the node's first slot.
        slots: The number of slots of all connected nodes.
        run_id: The name of the job.
        store: The address of the workers' store, or "" if the node must serve one for itself.
    """

    machine: Int64
    first_slot: Int64
    slots: Int64
    run_id: str
    store: str = ""


class Remember(_NodeMessage, frozen=True):
    """In an elastic job: keep the failures for the final report; the next coordinator must receive them."""

    failures: tuple[WorkerFailure, ...]


class FollowLauncher(_NodeMessage, frozen=True):
    """In an elastic job: follow the launcher of machine `number` from now on; if it is this one, be a candidate."""

    number: Int64
    address: str


class Answered(_NodeMessage, frozen=True):
    """In an elastic job: the reply to a launcher that requests to follow this one.

    Attributes:
        is_welcome: Whether the launcher may follow this one.
        number: The number of the machine that this launcher follows or is, or -1 if it follows none.
        address: The address of that machine's launcher.
        is_stranger: Whether this launcher does not take part in the job, which means that the previous one there has
            ended.
    """

    is_welcome: bool
    number: Int64
    address: str = ""
    is_stranger: bool = False


class Moved(_NodeMessage, frozen=True):
    """In an elastic job: this job gives way to another one that is already running; join that one at `address`."""

    job: str
    address: str


class Dropped(_NodeMessage, frozen=True):
    """The server continues without the node, or stops serving. It closes the connection, but has not ended."""


class RequestSnapshot(_NodeMessage, frozen=True):
    """Send a SnapshotReport, since workers of another node make no progress or have failed.

    With `is_deep`, a worker has failed because its calls did not match, and only many calls reveal the cause.
    """

    is_failure: bool = False
    is_deep: bool = False


class UserMessage(_NodeMessage, frozen=True):
    """A diagnosis for the user.

    Attributes:
        text: A sentence.
        is_last: Whether it is printed after the report of the failures.
        is_stall: Whether it explains why the job makes no progress.
        blamed: The ranks that cause the stall.
    """

    text: str
    is_last: bool = False
    is_stall: bool = False
    blamed: tuple[Int64, ...] = ()


class JobEnded(_NodeMessage, frozen=True, tag="End"):
    """The job has ended.

    Attributes:
        code: The launcher's exit code.
        reason: A sentence for the user, or "".
        failures: The failures that ended the job.
    """

    code: Int64
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
    | NotifyOrder
    | JobEnded
    | Heartbeat
    | TellTime
    | StartSlots
    | SendOrder
    | FenceStalledOrder
    | CloseSlotsOrder
    | ReplicateOrder
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


LARGEST = 1 << 22  # the size limit of a message in bytes
_LENGTH = struct.Struct("<I")
_message = msgspec.json.Decoder(Message)
_foreign_join = msgspec.json.Decoder(_ForeignJoin)


class MessageError(ValueError):
    """The peer sent data that is not a message."""


def encode(message: Message) -> bytes:
    """Returns the message, preceded by its length.

    Raises:
        MessageError: The message is too long.
    """
    try:
        body = msgspec.json.encode(message)
    except UnicodeEncodeError:  # a traceback or a path may hold bytes that are not UTF-8
        body = msgspec.json.encode(_encodable(msgspec.to_builtins(message)))
    if len(body) > LARGEST:
        raise MessageError(f"a message of {len(body)} bytes is larger than {LARGEST}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Returns the message in `body`. Of a JoinJob of another version, only the fields for its refusal are read.

    Raises:
        MessageError: `body` is not a message.
    """
    try:
        message: Message = decode_untrusted(_message.decode, body)
    except ValueError as error:
        if (join := _decode_foreign_join(body)) is not None:
            return join
        raise MessageError(f"not a message of a launcher ({type(error).__name__}: {error})") from error
    return message


def _decode_foreign_join(body: bytes) -> JoinJob | None:
    try:
        join = decode_untrusted(_foreign_join.decode, body)
    except ValueError:
        return None
    return None if join.version == __version__ else JoinJob(join.host, join.pid, "", 0, 0, version=join.version)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass
class Inbox:
    """A buffer that splits the received bytes into messages."""

    received: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Message]:
        """Adds received bytes; returns the messages that are complete.

        Raises:
            MessageError: The bytes are not a message.
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
