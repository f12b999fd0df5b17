"""Messages between launchers, and the token that authenticates them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.operate.launch.failures import Record, WorkerFailure
from paceline.operate.launch.multinode.membership import incompatibility
from paceline.operate.launch.multinode.protocol import (
    LARGEST,
    Follow,
    FollowResponse,
    Heartbeat,
    Inbox,
    JobEnded,
    JoinJob,
    MessageError,
    NodeDropped,
    Slots,
    Start,
    StartSlots,
    StateReplicated,
    TimeRequest,
    TimeResponse,
    WorkerExited,
    WorkerFailed,
    WorkerMessage,
    WorkersStopped,
    WorkerStalled,
    WorkerStarted,
    decode,
    encode,
)
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    ExitRequest,
    FenceStalledOrder,
    LauncherAddress,
    MachineReport,
    NotifyOrder,
    ReplicatedJobState,
    ReplicateOrder,
    SendOrder,
    StateTransfer,
    View,
    ViewFailed,
    ViewInstalled,
    WorkerReady,
    WorkerReport,
)

FAILURE = WorkerFailure(
    3, 77, -9, 1.5, Record(1.0, "ValueError", "ValueError: x"), "h1", "out of memory", "/logs/3", at_exit=True
)

VIEW = View((1 << 32) + 1, ("0.0.0", "1.0.0"), is_planned=True, store="tcp:h0:1")

STATE = ReplicatedJobState(
    1, 0, "same", VIEW.generation, (VIEW,), ("0.0.0",), (2,), (LauncherAddress(1, "h1", "h1:1"),),
    (StateTransfer(7, "2.0.0", ("1.0.0",)),), "job",
)  # fmt: skip

WORKERS = (
    WorkerReport("1.0.0", (WorkerReady("same", True), ViewInstalled(VIEW.generation, 3)), "stopped"),
    WorkerReport("1.1.0"),
)

MESSAGES = [
    Heartbeat(),
    Follow(MachineReport(1, "h1", 2, 1, STATE, WORKERS, (("1.2.0", "killed", -9),), ("1.2.0",), True), (FAILURE,)),
    StateReplicated(1 << 48),
    ReplicateOrder("1", STATE),
    FollowResponse(False, -1, "10.0.0.1:29400"),
    NodeDropped(),
    JoinJob("h0", 5, "10.0.0.1", 1234, 8, "trainer", None, True),
    WorkerFailed(2, FAILURE),
    WorkersStopped(2, 999, (FAILURE, WorkerFailure(1, 2, 7, 3.0, None, "h2"))),
    Start(1, 0, 3, "id", 0, 2, 0, 16, 0, 16, "fd00::1", 4321, ("h0", "h1")),
    JobEnded(1, "why", (FAILURE,)),
    WorkerStarted("0.1.0"),
    WorkerStalled("0.1.0", "stopped"),
    WorkerExited("0.1.0", "killed by SIGKILL", -9),
    WorkerMessage("0.1.0", ViewFailed(1, 2, 'it "broke"')),
    Slots(3, (FAILURE,)),
    StartSlots(1, 4, 8, "id", "tcp:10.0.0.1:4000"),
    SendOrder("0", "0.1.0", VIEW),
    SendOrder("0", "0.1.0", ExitRequest("asked to leave", 2)),
    CloseSlotsOrder("0", "the job has finished"),
    FenceStalledOrder("0", "0.1.0"),
    NotifyOrder("waiting for 0.1.0"),
    TimeRequest(1 << 62),
    TimeResponse(5, 1 << 62),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_a_message_arrives_as_it_was_sent_however_it_is_cut(message):
    inbox = Inbox()
    sent = encode(message) + encode(message)
    arrived = [found for at in range(len(sent)) for found in inbox.feed(sent[at : at + 1])]
    assert arrived == [message, message]


def test_a_join_of_another_version_is_partly_understood():
    join = next(each for each in MESSAGES if isinstance(each, JoinJob))
    content = {**json.loads(encode(join)[4:]), "version": "9.8.7", "color": "blue"}
    decoded = decode(json.dumps(content).encode())
    assert isinstance(decoded, JoinJob) and decoded.version == "9.8.7" and decoded.host == "h0" and decoded.pid == 5


@pytest.mark.parametrize("version", [{}, {"version": "9.8.7"}])
def test_a_join_of_another_version_is_refused_with_the_versions(version):
    content = {"kind": "Join", "host": "h0", "pid": 5, "address": 7, **version}  # with a field of a different type
    decoded = decode(json.dumps(content).encode())
    assert isinstance(decoded, JoinJob)
    wrong = incompatibility(decoded, is_elastic=False)
    assert wrong is not None and "h0 (pid 5) runs Paceline" in wrong and "install the same version" in wrong


def test_the_refusal_is_readable_for_every_version():
    assert json.loads(encode(JobEnded(2, "why"))[4:]) == {"kind": "End", "code": 2, "reason": "why", "failures": []}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_a_message_with_an_unknown_field_is_refused(message):
    content = {**json.loads(encode(message)[4:]), "version": paceline.__version__, "color": "blue"}
    with pytest.raises(MessageError, match="unknown field"):
        decode(json.dumps(content).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kind": "Popen", "args": ["sh"]}',
        b'{"kind": "WorkersFinished", "generation": "1"}',
        b'{"kind": "WorkersFinished", "generation": true}',
        b'{"kind": "WorkersFinished", "generation": 1, "more": 2}',
        b'{"kind": "WorkerFailed", "generation": 1, "failure": {"rank": 1}}',
        b'{"kind": "NodeStopped", "reason": ["x"]}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(MessageError):
        decode(body)


def test_a_length_beyond_the_limit_is_refused_at_once():
    with pytest.raises(MessageError, match="larger than"):
        Inbox().feed((LARGEST + 1).to_bytes(4, "little"))


@given(st.dictionaries(st.text(max_size=8), st.integers() | st.text() | st.none() | st.lists(st.integers())))
def test_any_json_is_a_message_or_refused(content):
    for kind in (
        "Join",
        "WorkersStopped",
        "Start",
        "End",
        "WorkerFailed",
        "Follow",
        "SendOrder",
        "ReplicateOrder",
        "WorkerMessage",
    ):
        with pytest.raises(MessageError):
            decode(json.dumps({**content, "kind": kind, "version": paceline.__version__, "unknown": 0}).encode())
