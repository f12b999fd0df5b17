"""A malformed frame from an authenticated peer closes only its own connection, in every protocol."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import wait_until

from paceline import __version__
from paceline.cli.doctor.network import _receive_line
from paceline.cli.top.client import PageAddress, PageUnreachableError, picture
from paceline.comm.engine import formation
from paceline.comm.group.collectives.object_codec import BodyFormat, MalformedPayload
from paceline.comm.group.collectives.object_codec import decode as decode_object
from paceline.comm.security.handshake import PeerHello, prove
from paceline.comm.security.secret import derive_key
from paceline.comm.store import remote_store
from paceline.comm.store.tcp_store import StoreServer
from paceline.errors import RendezvousError
from paceline.operate.diagnosis import machine_snapshot as pictures
from paceline.operate.launch import job_dashboard
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.failures import Record, WorkerFailure
from paceline.operate.launch.job import Command, Job, RendezvousOptions
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay, DiagnosisCollector
from paceline.operate.launch.multinode.membership import Orders
from paceline.operate.launch.multinode.protocol import (
    DashboardUpdate,
    JoinJob,
    MessageError,
    Slots,
    SnapshotReport,
    WorkersFinished,
    WorkerStalled,
    decode,
    encode,
)
from paceline.operate.launch.multinode.remote_client import connect_client
from paceline.operate.launch.multinode.server import CHANNEL, RendezvousServer
from paceline.operate.launch.ssh.protocol import MARK, MessageSplitter, decode_to_launcher
from paceline.operate.launch.worker_group_launcher import _controller
from paceline.train.checkpoint.peer_memory import protocol as copies
from paceline.train.checkpoint.peer_memory.server import CacheServer
from paceline.train.elastic import protocol as elastic
from paceline.train.elastic.state_transfer.transfer_protocol import BrokenTransferError, decode_head

SECRET = b"0123456789abcdef"
DEEP = 100_000
DEADLINE_S = 60.0

JSON_BODIES = {
    "nested lists": b"[" * DEEP + b"]" * DEEP,
    "nested objects": b'{"kind":' * DEEP + b"1" + b"}" * DEEP,
    "nested in a field that is not known": b'{"type":"WorkerReady","kind":"NodeStopped","fingerprint":"","x":'
    + b"[" * DEEP,
    "a number of 5,000 digits": b'{"type":"CaughtUp","kind":"Slots","count":' + b"9" * 5000 + b"}",
    "infinity": b'{"type":"CaughtUp","kind":"Slots","count":1e999,"round":1e999}',
    "no number": b'{"type":"CaughtUp","kind":"Slots","count":NaN,"round":NaN}',
    "another type": b'{"type":[],"kind":[],"ranks":{}}',
    "no object": b"7",
    "half a text": b'{"kind":"NodeStopped","reason":"\xff"}',
    "half a character": b'{"kind":"NodeStopped","reason":"\\ud8',
    "cut": b'{"kind":"NodeStopped"',
    "nothing": b"",
    "zeros": bytes(1000),
}
MSGPACK_BODIES = {
    "nested lists": b"\x91" * DEEP + b"\xc0",
    "nested objects": b"\x81\xa1x" * DEEP + b"\xc0",
    "nested in a field": b"\x96\xa8Contents\x00\x00" + b"\x91" * DEEP + b"\xc0",
    "a text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "a list of 2^32": b"\xdd\xff\xff\xff\xff",
    "half a text": b"\xa1\xff",
    "an unknown extension": b"\xd4\x05\x00",
    "a key that is a list": b"\x81\x90\x00",
    "nothing": b"",
}


def over_socket(receive: Callable[[socket.socket], object]) -> Callable[[bytes], object]:
    """Returns a decoder of the bytes that follow the length."""

    def decode(body: bytes) -> object:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
            theirs.sendall(struct.pack("<I", len(body)) + body)
            return receive(ours)

    return decode


def line_of_doctor(body: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(body[:5000].replace(b"\n", b" ") + b"\n")
        return _receive_line(ours)


DECODERS = [
    ("launchers", decode, MessageError),
    ("workers of elastic jobs", elastic.decode_from_worker, ValueError),
    ("their launchers", elastic.decode_to_worker, ValueError),
    ("pictures of workers", lambda body: pictures.decode(body.decode(errors="replace")), ValueError),
    ("the live page", lambda body: job_dashboard.decode_update(body.decode(errors="replace")), ValueError),
    ("requests for copies", over_socket(copies.receive_request), ValueError),
    ("answers with copies", over_socket(copies.receive_answer), ValueError),
    ("launchers by ssh", decode_to_launcher, ValueError),
    ("far ends of ssh", lambda body: MessageSplitter().feed(MARK + body.replace(b"\n", b"") + b"\n"), ValueError),
    ("the doctor", line_of_doctor, ConnectionError),
]
OBJECTS = {"infinity", "no number", "another type"}  # texts that Python's JSON parses as objects
ACCEPTED = {
    "the doctor": OBJECTS,
    "the live page": {"a number of 5,000 digits", "infinity", "half a text"},  # unknown fields are skipped
}
if sys.version_info >= (3, 14):  # the limit on recursion is the size of the stack, not a number of calls
    ACCEPTED["the live page"].add("nested objects")


@pytest.mark.parametrize("name", JSON_BODIES)
@pytest.mark.parametrize(("whose", "decoder", "error"), DECODERS, ids=[each[0] for each in DECODERS])
def test_malformed_json_is_refused_in_order(whose, decoder, error, name):
    if name in ACCEPTED.get(whose, ()):
        assert decoder(JSON_BODIES[name])
    else:
        with pytest.raises(error):
            decoder(JSON_BODIES[name])


WITHIN = {
    "a worker's message": b'{"kind":"WorkerMessage","uid":"0.0.0","message":%b}',
    "a machine's report": b'{"kind":"Follow","report":%b}',
    "a message for a worker": b'{"kind":"SendOrder","machine":"0","uid":"0.0.0","message":%b}',
    "the state of a job": b'{"kind":"ReplicateOrder","machine":"0","job_state":%b}',
}


@pytest.mark.parametrize("frame", WITHIN.values(), ids=WITHIN.keys())
@pytest.mark.parametrize("body", JSON_BODIES.values(), ids=JSON_BODIES.keys())
def test_a_part_of_a_message_that_cannot_be_read_is_no_message(frame, body):
    with pytest.raises(MessageError, match="not a message of a launcher"):
        decode(frame % body)


@pytest.mark.parametrize("body", JSON_BODIES.values(), ids=JSON_BODIES.keys())
def test_a_malformed_introduction_is_of_another_version(body):
    own = msgspec.json.encode({"version": __version__, "host": "h", "pid": 1, "namespace": 1, "started": 1})
    with pytest.raises(RendezvousError, match="the ranks run different versions of Paceline"):
        formation.read_ranks([own, body], 0)


@pytest.mark.parametrize("body", MSGPACK_BODIES.values(), ids=MSGPACK_BODIES.keys())
def test_malformed_msgpack_is_refused_in_order(body):
    with pytest.raises(BrokenTransferError):
        decode_head(body)
    with pytest.raises(MalformedPayload):
        decode_object(bytes([BodyFormat.MSGPACK]) + body, [])


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_refused(body):
    for _, decoder, error in DECODERS[:4]:
        with pytest.raises(error):
            decoder(body)
    with pytest.raises(BrokenTransferError):
        decode_head(body + b"\xc1")


@pytest.mark.parametrize("count", [1 << 63, -(1 << 63) - 1, 10**100])
def test_a_number_that_nothing_can_be_counted_with_is_no_message(count):
    with pytest.raises(MessageError, match=r"Expected `int` [<>]= -?92233720368547758\d\d - at `\$\.count`"):
        decode(json.dumps({"kind": "Slots", "count": count, "failures": []}).encode())


def test_a_failure_with_a_wrong_field_is_no_message():
    failure = {"rank": 1, "pid": 2, "exit_code": 1, "seen_s": 1.0, "record": None, "host": "h"}
    assert isinstance(decode(json.dumps({"kind": "Slots", "count": 1, "failures": [failure]}).encode()), Slots)
    for name, value in (("rank", 1.5), ("seen_s", float("nan")), ("host", []), ("record", {"text": 1}), ("x", 1)):
        with pytest.raises(MessageError):
            decode(json.dumps({"kind": "Slots", "count": 1, "failures": [{**failure, name: value}]}).encode())


def test_text_that_cannot_be_encoded_is_escaped():
    assert decode(encode(WorkerStalled("0", "a\ud800"))[4:]) == WorkerStalled("0", "a\\ud800")
    failure = WorkerFailure(1, 2, 1, 1.0, Record(1.0, "ValueError", "a\ud800"), "h")
    (arrived,) = decode(encode(Slots(1, (failure,)))[4:]).failures
    assert arrived.record.text == "a\\ud800"


def test_half_a_character_is_no_message():
    with pytest.raises(MessageError):
        decode(json.dumps({"kind": "WorkerStalled", "uid": "0", "why": "a\ud800"}).encode())


# Servers: one connection sends an invalid frame, and another connection is served as before.


@dataclass
class Listening:
    """A controller that records nodes that join and leave, and cannot process `Slots`."""

    deadline_s = None
    reports: list[object] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)

    def reported(self, node: str, report: object, now_s: float) -> Orders:
        if isinstance(report, Slots):
            raise KeyError(report.count)
        self.reports.append(report)
        return []

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        return []

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        self.lost_nodes.append(why)
        return []

    def tick(self, now_s: float) -> Orders:
        return []


def admitted(address: tuple[str, int] | str, channel: str) -> socket.socket:
    """Connects as a client that has the secret."""
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.settimeout(DEADLINE_S)
    connection.connect(address)
    prove(connection, derive_key(SECRET, channel), PeerHello(channel))
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Waits until a connection is closed."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    return True


FRAMES = {
    **{name: struct.pack("<I", len(body)) + body for name, body in JSON_BODIES.items()},
    **{f"{name} that cannot be read": struct.pack("<I", len(frame)) + frame for name, frame in WITHIN.items()},
    "a length of 4 GiB": b"\xff\xff\xff\xff",
    "a report that the steering cannot take": encode(Slots(7)),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_a_malformed_frame_does_not_end_the_rendezvous(frame):
    steering = Listening()
    server = RendezvousServer(socket.create_server(("127.0.0.1", 0)), SECRET, steering, DEADLINE_S)
    client = connect_client(server.address, SECRET, DEADLINE_S, DEADLINE_S, print)
    try:
        with admitted(server.address, CHANNEL) as hostile:
            hostile.sendall(frame)
            assert is_ended(hostile)
        wait_until(lambda: steering.lost_nodes)
        client.send(WorkersFinished(5))
        wait_until(lambda: WorkersFinished(5) in steering.reports)
        assert len(steering.lost_nodes) == 1
        assert "not a message of a launcher" in steering.lost_nodes[0] or (
            "is larger than" in steering.lost_nodes[0]
            or "sent a Slots, which led to KeyError: 7" in steering.lost_nodes[0]
        )
    finally:
        client.close()
        server.close(0.0)


def job(is_elastic: bool) -> Job:
    rendezvous = RendezvousOptions(min_nodes=2, max_nodes=4, address=("10.0.0.1", 29400))
    return Job(Command(("x.py",)), workers=2, rendezvous=rendezvous, elastic=ElasticOptions() if is_elastic else None)


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize("body", JSON_BODIES.values(), ids=JSON_BODIES.keys())
def test_no_text_within_a_report_ends_the_rendezvous(is_elastic, body):
    steering = DashboardRelay(DiagnosisCollector(_controller(job(is_elastic))))
    text = body.decode(errors="replace")
    for number in (1, 2):
        join = JoinJob(f"h{number}", 5, f"10.0.0.{number}", 4000, 2, serves=number == 1, version=__version__)
        steering.reported(f"node-{number}", msgspec.structs.replace(join, is_elastic=is_elastic), 1.0)
    for report in (SnapshotReport(text), DashboardUpdate(text)):
        orders = steering.reported("node-2", decode(encode(report)[4:]), 1.0)
        assert all(encode(order) for _, order in orders)
    assert steering.deadline_s is None or steering.tick(1.5) is not None


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_a_malformed_request_does_not_end_the_service_of_copies(tmp_path, frame):
    service = CacheServer(None)
    path = str(tmp_path / "copies")
    service.open(path, SECRET)
    try:
        with admitted(path, "copies") as hostile, admitted(path, "copies") as friend:
            hostile.sendall(frame)
            hostile.shutdown(socket.SHUT_WR)
            assert is_ended(hostile)
            copies.send(friend, copies.ListCheckpoints("/root"))
            assert isinstance(copies.receive_answer(friend), copies.Inventory)
    finally:
        service.shut()


STORE_FRAMES = [
    *FRAMES.values(),
    bytes(4096),
    b"\xff" * 4096,
    struct.pack("<I", 9) + b"\x63" + bytes(8),
    struct.pack("<I", 13) + b"\x01" + bytes(8) + b"\xff\xff\xff\xff",
    struct.pack("<Q", 1 << 62),
]


@pytest.mark.parametrize("frame", STORE_FRAMES, ids=range(len(STORE_FRAMES)))
def test_a_malformed_request_does_not_end_the_store(tmp_path, frame):
    path = str(tmp_path / "store")
    server = StoreServer.on_unix_path(path, SECRET)
    store = remote_store.connect_unix(path, SECRET, timedelta(seconds=DEADLINE_S))
    try:
        with admitted(path, remote_store.CHANNEL) as hostile:
            hostile.sendall(frame)
            hostile.shutdown(socket.SHUT_WR)
            assert is_ended(hostile)
        store.set("key", b"value")
        assert store.get("key") == b"value"
    finally:
        store.close()
        server.close()


@pytest.mark.parametrize("name", sorted(JSON_BODIES.keys() - OBJECTS))
def test_what_is_no_picture_is_an_error_of_the_page_that_sent_it(name):
    body = JSON_BODIES[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode() + body)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(PageUnreachableError, match="is not from the page of a job"):
                picture(PageAddress("token", "127.0.0.1", listener.getsockname()[1]))
        finally:
            thread.join(DEADLINE_S)
    assert not thread.is_alive()
