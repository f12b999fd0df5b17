"""Protocol of the rendezvous: reports from nodes, orders to nodes, and their encoding as length-prefixed JSON.

Each report and each order is a frozen msgspec struct, so the declarations below also validate received data. A frame
that matches none of the declarations raises `MessageError`. Received data is never executed. Orders from an elastic
job's coordinator and messages from its workers (`train/elastic/protocol.py`) are forwarded unchanged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from paceline import __version__
from paceline.comm.security.untrusted_peers import Int64, decode_untrusted, encodable
from paceline.operate.launch.failures import WorkerFailure
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
    """Base class for reports and orders."""


class JoinJob(_NodeMessage, frozen=True, tag="Join"):
    """Report: a node requests to join the job.

    The tags of `JoinJob` and `JobEnded` never change. A launcher with a different version can therefore receive the
    reason why it was refused.
    """

    host: str
    pid: Int64
    address: str  # the address at which other nodes can reach the node
    port: Int64  # the port for torch's store if rank 0 runs on this node
    workers: Int64  # the number of workers on the node
    role: str = "default"  # the role of the node's workers, as in torchelastic
    node_rank: Int64 | None = None  # the node's number in a static job
    serves: bool = False  # whether the node hosts the rendezvous
    version: str = ""  # versions before 0.1.0 do not send it
    is_elastic: bool = False  # whether the launcher was started with `--elastic`
    listens: str = ""  # elastic: the launcher's address for other launchers, in case it becomes the coordinator
    number: Int64 = -1  # elastic: the machine's number if it is already part of the job; it then sends a `Follow`
    store_port: Int64 = 0  # the port for Paceline's store if rank 0 runs on this node
    job: str = ""  # elastic: the identity of the job that the node was ordered to join, or ""


class _ForeignJoin(msgspec.Struct, frozen=True):
    """The fields needed to refuse a JoinJob from a different version."""

    kind: Literal["Join"]
    host: str = ""
    pid: Int64 = 0
    version: str = ""


class WorkerFailed(_NodeMessage, frozen=True):
    """Report: the first failure of a worker on the node in this generation. The node is stopping its other workers."""

    generation: Int64
    failure: WorkerFailure


class WorkersFinished(_NodeMessage, frozen=True):
    """Report: all workers on the node have exited without a failure."""

    generation: Int64


class WorkersStopped(_NodeMessage, frozen=True):
    """Report: all workers on the node have exited. The ports are for the next generation, as in `JoinJob`."""

    generation: Int64
    port: Int64
    failures: tuple[WorkerFailure, ...] = ()
    store_port: Int64 = 0


class NodeStopped(_NodeMessage, frozen=True):
    """Report: the node was stopped by its user or scheduler, and its workers have exited."""

    reason: str


class ExitNotice(_NodeMessage, frozen=True):
    """Elastic report: the launcher leaves the job, or hands over the coordination, once its workers have exited."""


class WorkerStarted(_NodeMessage, frozen=True):
    """Elastic report: a worker is running."""

    uid: str


class WorkerStalled(_NodeMessage, frozen=True):
    """Elastic report: a worker is stopped. Once the worker is resumed, a WorkerStarted follows."""

    uid: str
    why: str


class WorkerExited(_NodeMessage, frozen=True):
    """Elastic report: a worker has exited, and all of its messages have been reported. `how` is for the user."""

    uid: str
    how: str
    exit_code: Int64


class WorkerMessage(_NodeMessage, frozen=True):
    """Elastic report: a message from a worker."""

    uid: str
    message: FromWorker


class Slots(_NodeMessage, frozen=True):
    """Elastic report: the number of open slots on the node, and the failures that caused other slots to be closed."""

    count: Int64
    failures: tuple[WorkerFailure, ...] = ()


class Follow(_NodeMessage, frozen=True):
    """Elastic report: a machine that is already part of the job now follows this launcher."""

    report: MachineReport
    failures: tuple[WorkerFailure, ...] = ()  # the failures that it has reported or was ordered to store


class JobRunning(_NodeMessage, frozen=True):
    """Elastic report: a notice to the launcher at the rendezvous address that a job is already running.

    A launcher that is part of that job responds with a FollowResponse. Any other launcher does not respond.
    """

    job: str  # the identity of the job
    address: str = ""  # the coordinator's address, or "" while the job's launchers search for a coordinator


class StateReplicated(_NodeMessage, frozen=True):
    """Elastic report: the node has stored the replicated state, including all views up to `generation`."""

    generation: Int64


class SnapshotReport(_NodeMessage, frozen=True):
    """Report: a snapshot of the node's workers.

    The node sends a snapshot on request, if a call takes too long, if a worker fails, and after its workers have
    exited. The node also sends a report with an empty `body` when stalled calls resume.
    """

    body: str  # the snapshot, encoded by `operate/diagnosis/machine_snapshot.py`
    is_last: bool = False  # whether the workers have exited
    is_failure: bool = False  # whether a worker has failed, on this node or on the one that caused the request
    is_short: bool = False  # whether the workers have finished, but ran too briefly for a straggler search


class DashboardWatched(_NodeMessage, frozen=True):
    """Report: whether the live page has viewers. Sent by the node that serves the page, and relayed to other nodes."""

    is_on: bool


class StacksRequest(_NodeMessage, frozen=True):
    """Report: requests the workers' stacks in a DashboardUpdate. Sent and relayed like `DashboardWatched`."""


class DashboardUpdate(_NodeMessage, frozen=True):
    """Report: the state and output of a node's ranks for the page, encoded by `operate/launch/job_dashboard.py`."""

    body: str


class Heartbeat(_NodeMessage, frozen=True):
    """A keep-alive message, sent in both directions."""


class TimeRequest(_NodeMessage, frozen=True):
    """Report: a request for the time on the rendezvous's machine. `requested_ns` is CLOCK_MONOTONIC on the node."""

    requested_ns: Int64


class TimeResponse(_NodeMessage, frozen=True):
    """Order: the response to `TimeRequest`. `remote_ns` is CLOCK_MONOTONIC on the machine that hosts the rendezvous."""

    requested_ns: Int64
    remote_ns: Int64


class Start(_NodeMessage, frozen=True):
    """Order: start the workers of a generation."""

    generation: Int64
    restart_count: Int64
    max_restarts: Int64
    run_id: str
    group_rank: Int64  # the number of this node
    group_world_size: Int64  # the number of nodes
    first_rank: Int64  # the first rank on this node
    world_size: Int64  # the total number of workers
    role_first_rank: Int64  # the first rank on this node within the workers' role
    role_world_size: Int64  # the total number of workers in that role
    master_addr: str  # the address of the node with rank 0
    master_port: Int64  # the port of torch's store at `master_addr`
    hosts: tuple[str, ...] = ()  # the host names of all nodes, in rank order
    store_port: Int64 = 0  # the port of Paceline's store at `master_addr`; 0 on a single machine


class Stop(_NodeMessage, frozen=True):
    """Order: stop the workers and report `WorkersStopped`.

    After a failure (`is_failure`), the workers are given some time to report the resulting errors.
    """

    generation: Int64
    reason: str
    is_failure: bool = False


class StartSlots(_NodeMessage, frozen=True):
    """Elastic order: start a worker in each slot."""

    machine: Int64  # the number of the node's machine, which is never reused
    first_slot: Int64  # the number of the node's first slot
    slots: Int64  # the total number of slots on all connected nodes
    run_id: str
    store: str = ""  # the address of the workers' store, or "" if the node must serve its own store


class RecordFailures(_NodeMessage, frozen=True):
    """Elastic order: store the failures for the final report and for the next coordinator."""

    failures: tuple[WorkerFailure, ...]


class FollowLauncher(_NodeMessage, frozen=True):
    """Elastic order: follow the launcher on machine `number`. The launcher on that machine becomes a candidate."""

    number: Int64
    address: str


class FollowResponse(_NodeMessage, frozen=True):
    """Elastic order: the response to a launcher that requests to follow this one."""

    is_welcome: bool  # whether the launcher may follow this one
    number: Int64  # the machine that this launcher follows, possibly its own; -1 if there is none
    address: str = ""  # the address of the launcher on machine `number`
    is_stranger: bool = False  # whether this launcher is not part of the job; the previous one has then exited


class JobMoved(_NodeMessage, frozen=True):
    """Elastic order: abandon this job, because another job is already running, and join that job at `address`."""

    job: str
    address: str


class NodeDropped(_NodeMessage, frozen=True):
    """Order: the server drops the node or stops serving, and closes the connection. The server's launcher continues."""


class RequestSnapshot(_NodeMessage, frozen=True):
    """Order: send a SnapshotReport, because workers on another node have stalled or failed.

    `is_deep` is set if a worker failed because of mismatched calls. The diagnosis then requires many calls per worker.
    """

    is_failure: bool = False
    is_deep: bool = False


class UserMessage(_NodeMessage, frozen=True):
    """Order: print a diagnosis for the user.

    A text that explains neither a stall nor a failure reports the end of a stall.
    """

    text: str
    is_last: bool = False  # whether to print the text at the end of the job, after the report of the failures
    is_headline: bool = False  # whether to print it before that report, because no failure is the cause
    is_stall: bool = False  # whether the text explains a stall
    is_failure: bool = False  # whether the text explains a failure
    blamed: tuple[Int64, ...] = ()  # the ranks that caused the stall or the failure


class JobEnded(_NodeMessage, frozen=True, tag="End"):
    """Order: the job has ended, and the launcher exits with `code`. `reason` is a sentence for the user, or ""."""

    code: Int64
    reason: str = ""
    failures: tuple[WorkerFailure, ...] = ()  # the failures that ended the job


Report = (
    JoinJob
    | WorkerFailed
    | WorkersFinished
    | WorkersStopped
    | NodeStopped
    | ExitNotice
    | Heartbeat
    | TimeRequest
    | WorkerStarted
    | WorkerStalled
    | WorkerExited
    | WorkerMessage
    | Slots
    | Follow
    | JobRunning
    | StateReplicated
    | SnapshotReport
    | DashboardWatched
    | StacksRequest
    | DashboardUpdate
)
Order = (
    Start
    | Stop
    | NotifyOrder
    | JobEnded
    | Heartbeat
    | TimeResponse
    | StartSlots
    | SendOrder
    | FenceStalledOrder
    | CloseSlotsOrder
    | ReplicateOrder
    | RecordFailures
    | FollowLauncher
    | FollowResponse
    | JobMoved
    | NodeDropped
    | RequestSnapshot
    | UserMessage
    | DashboardWatched
    | StacksRequest
    | DashboardUpdate
)
Message = Report | Order


LARGEST = 1 << 22  # maximum message size in bytes
_LENGTH = struct.Struct("<I")
_message = msgspec.json.Decoder(Message)
_foreign_join = msgspec.json.Decoder(_ForeignJoin)


class MessageError(ValueError):
    """Raised if the peer sends data that is not a valid message."""


def encode(message: Message) -> bytes:
    """Encodes a message, preceded by its length; raises a MessageError if it is too long."""
    try:
        body = msgspec.json.encode(message)
    except UnicodeEncodeError:  # a traceback or a path may contain bytes that are not valid UTF-8
        body = msgspec.json.encode(_encodable(msgspec.to_builtins(message)))
    if len(body) > LARGEST:
        raise MessageError(f"a message of {len(body)} bytes is larger than {LARGEST}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Decodes a message, or raises a MessageError.

    If a JoinJob has a different version, only the fields needed to refuse it are read.
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
        """Adds received bytes and returns the complete messages; raises a MessageError if one of them is not valid."""
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
