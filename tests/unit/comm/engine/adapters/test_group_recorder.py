"""The thread that reads device times, and the clock that converts them."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline import _core
from paceline.comm.engine.adapters import group_recorder
from paceline.comm.engine.adapters.device_streams import AcceleratorEvent
from paceline.comm.engine.adapters.group_recorder import DeviceClock, DeviceWatch


def test_what_is_added_during_its_last_poll_is_polled_again():
    watch, device, again = DeviceWatch(), torch.device("cpu"), threading.Event()
    polls = 0

    def poll() -> bool:
        nonlocal polls
        polls += 1
        if polls == 1:
            watch.add(poll, device)  # like a mark that is added right after the last one was read
        else:
            again.set()
        return False

    watch.add(poll, device)
    assert again.wait(30)


class StuckEvent:
    """An event behind work that does not end while the test runs, such as a call that waits for another rank."""

    def query(self) -> bool:
        return False

    def elapsed_time(self, later: object) -> float:
        raise RuntimeError("the event is not complete")


@pytest.mark.timeout(60)
def test_a_clock_behind_a_call_does_not_block_its_reader(monkeypatch):
    monkeypatch.setattr(_core, "record_tick_at", lambda monotonic_ns: monotonic_ns)
    device = torch.device("cpu")
    clock, event = DeviceClock(device), AcceleratorEvent(device, None)
    stuck = AcceleratorEvent(device, StuckEvent())
    clock._stream.record = lambda timing: stuck
    before = group_recorder.time.monotonic_ns()
    assert before <= clock.tick_of(event) <= clock.tick_of(event) <= group_recorder.time.monotonic_ns()
    del clock._stream.record
    clock._next_reading_ns = 0
    assert abs(clock.tick_of(event) - group_recorder.time.monotonic_ns()) < 60e9
    origin = clock._origin
    clock._stream.record = lambda timing: stuck
    clock._next_reading_ns = 0
    clock.tick_of(event)
    assert clock._origin is origin is not None, "the last reading stays valid"
