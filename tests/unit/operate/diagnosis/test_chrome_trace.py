"""Recordings as a trace: every rank on one axis, rows without overlap, arrows between sends and receives."""

from __future__ import annotations

import json
from dataclasses import replace

from paceline.cli.main import main
from paceline.comm.record.layout import EventKind
from paceline.operate.diagnosis.chrome_trace import trace_of
from paceline.operate.diagnosis.recording import (
    CallRecord,
    CallStatus,
    Clock,
    EventRecord,
    GroupRecord,
    Pair,
    ProcessRecording,
)

MS = 1_000_000
CLOCK = Clock("boot/0", 0, (Pair(0, 0, 1_000_000 * MS), Pair(1000, 1000 * MS, 1_001_000 * MS)))


def a_call(index: int, operation: str, at_ms: int, **other: object) -> CallRecord:
    call = CallRecord(
        index=index,
        group=1,
        sequence=0 if operation in ("send", "recv") else index + 1,
        operation=operation,
        dtype="float32",
        count=10,
        root=None,
        reduction="sum",
        algorithm=None,
        state=CallStatus.DONE,
        outcome="ok",
        is_async=False,
        arrived_ns=at_ms * MS,
        started_ns=at_ms * MS,
        complete_ns=None,
        ended_ns=(at_ms + 2) * MS,
        last_arrived=1,
        missing=(),
        shm_nbytes=40,
        tcp_nbytes=0,
        step=1,
        thread=50,
        tag=None,
    )
    return replace(call, **other)


def an_event(index: int, kind: EventKind, at_ms: int, **other: object) -> EventRecord:
    start_ns = at_ms * MS
    return replace(EventRecord(index, kind, None, start_ns, start_ns + MS, None, 1, 0, None, 1, 50), **other)


def a_recording(rank: int, calls: list[CallRecord], events: list[EventRecord]) -> ProcessRecording:
    groups = {1: GroupRecord(1, "default", 7, "paceline", 2, rank, (0, 1), 0, None)}
    return ProcessRecording(
        "file", 100 + rank, rank, 2, "", "host", True, 1, 100 * MS, CLOCK, groups, tuple(calls), tuple(events)
    )


def test_all_ranks_are_on_one_axis():
    first = a_recording(0, [a_call(0, "all_reduce", 10)], [an_event(0, EventKind.STEP, 5)])
    second = a_recording(1, [a_call(0, "all_reduce", 12, ended_ns=None, outcome=None)], []).shifted(3 * MS)
    trace = trace_of([first, second], error_ns=5)
    spans = {(each["pid"], each["name"]): each for each in trace["traceEvents"] if each["ph"] == "X"}
    assert spans[(0, "step 1")]["ts"] == 0.0
    assert (spans[(0, "all_reduce")]["ts"], spans[(0, "all_reduce")]["dur"]) == (5000.0, 2000.0)
    still = spans[(1, "all_reduce")]
    assert still["ts"] == (12 + 3 - 5) * 1000.0
    assert still["args"]["has ended"] is False and still["dur"] == (100 - 12) * 1000.0
    assert trace["otherData"]["clock error between hosts, ns"] == 5
    json.dumps(trace)


def test_arrows_lead_from_sends_to_receives():
    sends = [a_call(at, "send", 10 * at, root=1, tag=5) for at in range(3)]
    receives = [a_call(at, "recv", 10 * at + 4, root=0, tag=5) for at in (1, 2)]
    other = a_call(9, "recv", 90, root=0, tag=6)
    trace = trace_of([a_recording(0, sends, []), a_recording(1, [*receives, other], [])])
    arrows = [(each["ph"], each["pid"], each["ts"]) for each in trace["traceEvents"] if each.get("name") == "message"]
    assert arrows == [("s", 0, 10000.0), ("f", 1, 16000.0), ("s", 0, 20000.0), ("f", 1, 26000.0)]


def test_numbers_are_counters_and_buckets_may_overlap():
    events = [
        an_event(0, EventKind.VALUE, 1, name="loss", value=0.5),
        an_event(1, EventKind.BUCKET, 2, first=0, second=40, sent_ns=3 * MS, end_ns=9 * MS),
        an_event(2, EventKind.BUCKET, 4, first=1, second=40, end_ns=None),
        an_event(3, EventKind.SPAN, 6, name="augment"),
    ]
    shown = [each for each in trace_of([a_recording(0, [], events)])["traceEvents"] if each["ph"] != "M"]
    assert [(each["ph"], each["name"]) for each in shown] == [
        ("C", "loss"),
        ("b", "bucket 0"),
        ("n", "bucket 0"),
        ("e", "bucket 0"),
        ("b", "bucket 1"),
        ("X", "augment"),
    ]


def test_workers_that_had_the_same_rank_are_apart():
    recordings = [
        replace(a_recording(0, [a_call(0, "barrier", at)], []), pid=300, worker=f"0.0.{at}") for at in (0, 1, 2)
    ]
    trace = trace_of(recordings)
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert [each["pid"] for each in spans] == [0, 300, 301]
    names = [each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"]
    assert names[1] == "worker 0.0.1, last rank 0 (host, pid 300)"


def test_a_profile_of_torch_is_on_the_same_axis():
    recording = a_recording(0, [a_call(0, "barrier", 0)], [])
    time_of_day_us = 1_000_000 * MS / 1000
    profile = {
        "baseTimeNanoseconds": int(time_of_day_us * 1000) - 2 * MS,
        "distributedInfo": {"rank": 0},
        "traceEvents": [{"ph": "X", "name": "aten::add", "pid": 77, "tid": 1, "ts": 3000.0, "dur": 1.0}],
    }
    events = trace_of([recording], merged=[profile])["traceEvents"]
    (added,) = [each for each in events if each["name"] == "aten::add"]
    assert (added["ts"], added["pid"]) == (1000.0, "torch.profiler of rank 0: 77")


def test_the_command_says_where_it_found_nothing(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 1
    assert f"{tmp_path} contains no recording" in capsys.readouterr().err
