"""Reports about calls that take too long, combined from the nodes' snapshots."""

from __future__ import annotations

import os
import threading
import time

import pytest

from paceline.operate.diagnosis import failure_snapshot, machine_snapshot
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot
from paceline.operate.diagnosis.stall_detector import (
    WatchedWorker,
)
from paceline.operate.launch import watchdog
from paceline.operate.launch.multinode.protocol import (
    RequestSnapshot,
    SnapshotReport,
    UserMessage,
    decode,
    encode,
)


def test_no_thread_imports_any_more_when_a_process_may_fork(monkeypatch):
    goes_on, ended = threading.Event(), []

    def prepare():
        goes_on.wait(60)
        ended.append(True)

    monkeypatch.setattr(failure_snapshot, "prepare", prepare)
    monkeypatch.setattr(watchdog, "latest_tick", lambda _: 1)
    watcher = watchdog.Watchdog(15.0, lambda: [WatchedWorker(0, os.getpid(), 0)], lambda *_: None)
    watcher.tick(time.monotonic() + 10)
    threading.Timer(0.2, goes_on.set).start()
    watcher.close(lives_on=True)
    assert ended == [True]


@pytest.mark.parametrize("is_stalled", [False, True])
def test_a_request_during_a_look_is_answered(monkeypatch, is_stalled):
    """Without a stall, the look in progress reports nothing, so a second look answers the other node's request."""
    goes_on, asked = threading.Event(), []

    def look(workers, patience, is_requested, *rest):
        asked.append(is_requested)
        goes_on.wait(60)
        seen = MachineSnapshot(time.monotonic(), (), 1.0 if is_stalled else None)
        return seen if is_requested or is_stalled else None

    monkeypatch.setattr(machine_snapshot, "snapshot_if_stalled", look)
    reports = []
    watcher = watchdog.Watchdog(15.0, list, lambda *report: reports.append(report))
    watcher.start_snapshot(is_requested=False)
    watcher.start_snapshot(is_requested=True)
    goes_on.set()
    for _ in range(1 if is_stalled else 2):
        watcher.collect()
    watcher.close()
    assert asked == ([False] if is_stalled else [False, True]) and len(reports) == 1


@pytest.mark.parametrize(
    "message",
    [
        SnapshotReport("{}", is_last=True),
        SnapshotReport("", is_failure=True),
        RequestSnapshot(),
        RequestSnapshot(True),
        UserMessage("text"),
    ],
)
def test_messages_survive_the_wire(message):
    assert decode(encode(message)[4:]) == message
