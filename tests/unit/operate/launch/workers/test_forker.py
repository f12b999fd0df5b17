"""Imports in a forked worker."""

from __future__ import annotations

import os
import threading

from launching import wait_until

from paceline.comm.record import layout
from paceline.operate.diagnosis import failure_snapshot
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.watchdog import Watchdog


def test_what_a_verdict_needs_is_imported_when_a_worker_records(monkeypatch):
    is_prepared = threading.Event()
    monkeypatch.setattr(failure_snapshot, "prepare", is_prepared.set)
    recording = os.memfd_create("recording")
    os.truncate(recording, layout.NBYTES)
    watcher = Watchdog(15.0, lambda: [WatchedWorker(0, os.getpid(), recording)], lambda body, is_failure: None)
    watcher.tick(watcher.deadline_s)
    assert not is_prepared.is_set(), "the workers have not begun"
    os.pwrite(recording, layout.PROGRESS.pack(7, 1), layout.PROGRESS_AT)
    watcher.tick(watcher.deadline_s)
    wait_until(is_prepared.is_set)
    watcher.close()
    os.close(recording)
