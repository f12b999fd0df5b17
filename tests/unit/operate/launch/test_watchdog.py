"""Reports about calls that take too long, combined from the nodes' snapshots."""

from __future__ import annotations

import os
import threading
import time

import pytest

from paceline.operate.diagnosis import failure_snapshot
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
