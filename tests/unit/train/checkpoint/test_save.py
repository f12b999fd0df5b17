"""Saves that run in parallel with training."""

from __future__ import annotations

import threading

import pytest

from paceline.train.checkpoint import save
from paceline.train.checkpoint.save import SaveHandle


def test_what_is_done_beside_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == "paceline-copies":
            raise RuntimeError("can't start new thread")
        begin_thread(thread)

    begin_thread = threading.Thread.start
    monkeypatch.setattr(save.threading.Thread, "start", start)
    done: list[str] = []
    assert SaveHandle(lambda: done.append("disk"), "step_1", lambda: done.append("memory")).wait()
    assert done == ["disk", "memory"]
