"""Calls on one rank's stream, whose progress the test controls, and the thread that monitors the calls."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import wait_until

import paceline as dist
from paceline.comm.engine.channel import OutcomeCode
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.torch_backend import device_calls
from paceline.comm.engine.torch_backend.collectives import StartedCall
from paceline.comm.engine.torch_backend.device_calls import CallStream, CallWatch, StreamRanks, StreamSettings
from paceline.comm.engine.torch_backend.process_groups import OwnedProcessGroup

SECOND_NS = 1_000_000_000
HEADER = (0, 0, 0, 0, -1, 1)


class Position:
    """An event on a stream that completes when the test sets it."""

    def __init__(self) -> None:
        self.passed = False
        self.orders = 0

    def done(self) -> bool:
        return self.passed

    def order(self) -> None:
        self.orders += 1


class Recorded:
    def __init__(self) -> None:
        self.outcomes: list[int] = []

    def start(self) -> None:
        pass

    def end(self, outcome: int, /) -> None:
        self.outcomes.append(outcome)


class OneRank:
    """A call stream of one rank, with its group's failures and the events of its calls."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.positions: list[Position] = []
        self.recorded = Recorded()
        ends = {name: lambda name=name: self.ends.append(name) for name in ("shutdown", "abort")}
        group = SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"), **ends)
        settings = StreamSettings(
            lambda store, rank, size: OwnedProcessGroup(group, store), "NCCL", "Advice", lambda device: "", self.store()
        )
        ranks = StreamRanks((RankIdentity(0, "alpha", 11),), (0,), 0)
        self.calls = CallStream(settings, torch.device("cpu"), self.store(), ranks, lambda group: StartedCall(None))
        self.calls.stream.record = self._record  # type: ignore[assignment,method-assign]

    @staticmethod
    def store() -> dist.HashStore:
        return dist.HashStore()

    def _record(self, timing: bool = False) -> Any:
        self.positions.append(Position())
        return self.positions[-1]

    def call(self, timeout_ns: int = 60 * SECOND_NS) -> device_calls.DeviceWork:
        return self.calls.enqueue(lambda group: StartedCall(None), HEADER, timeout_ns, self.recorded)


def test_a_call_is_complete_where_its_stream_has_passed_it():
    one = OneRank()
    work = one.call()
    assert work.is_enqueued() and not work.done() and not work.finish(1000)
    assert work.wait(1 << 62) and work.wait(1 << 62) and one.positions[0].orders == 2, (
        "each stream that waits is ordered"
    )
    assert one.calls.look() and one.recorded.outcomes == []
    one.positions[0].passed = True
    assert work.done() and work.finish(SECOND_NS) and work.outcome() is None
    one.calls.look()
    assert one.recorded.outcomes == [OutcomeCode.OK]


def test_a_call_beyond_its_deadline_is_aborted_and_all_fail():
    one = OneRank()
    works = [one.call(timeout_ns=1), one.call()]
    assert not one.calls.look()
    assert one.ends == ["abort"] and one.calls.failure is not None
    for work in [*works, one.call()]:
        assert work.done() and work.outcome() is one.calls.failure
    assert one.recorded.outcomes == [OutcomeCode.REFUSED] * 3
    assert "all ranks made this call, but it had not completed after" in one.calls.failure.detail


def test_the_end_of_a_group_waits_for_a_device_that_is_behind():
    one = OneRank()
    work = one.call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ending = threading.Thread(target=lambda: (one.calls.drain(), one.calls.close(time.monotonic() + 10)))
        ending.start()
        time.sleep(0.1)
        assert ending.is_alive() and one.ends == [] and one.call().outcome() is not None
        one.positions[0].passed = True
        ending.join(10)
    assert one.ends == ["shutdown"] and work.outcome() is None


def test_the_end_of_a_group_says_which_calls_it_cut_off():
    one = OneRank()
    one.call(timeout_ns=SECOND_NS // 10)
    time.sleep(0.2)
    watch = CallWatch()
    watch.add(one.calls)
    watch.wake()
    with pytest.warns(
        RuntimeWarning, match=r"rank 0 .* aborted up to 1 incomplete calls on cpu, .*tensors are undefined: REFUSED"
    ):
        one.calls.drain()
    watch.close()
    assert one.ends == ["abort"]


def fail(*_: object) -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_group_ends_although_its_device_reports_errors():
    one = OneRank()
    work = one.call()
    one.positions[0].done = fail  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="aborted up to 1 incomplete calls on cpu, .*an illegal memory access"):
        one.calls.drain()
    one.calls.close(time.monotonic() + 10)
    assert one.ends == ["abort"] and work.outcome() is one.calls.failure


def test_a_device_that_cannot_become_current_fails_the_calls(monkeypatch):
    """After an illegal access, CUDA may report the error to a thread that selects the device."""
    one = OneRank()
    work = one.call()
    monkeypatch.setattr(device_calls, "polled", fail)
    assert not one.calls.look()
    assert work.done() and "illegal memory access" in work.outcome().detail


def test_captured_calls_are_not_watched_nor_the_first_ones(monkeypatch):
    one = OneRank()
    monkeypatch.setattr(device_calls, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="cannot be captured into a graph: make one such call before"):
        one.call()
    monkeypatch.undo()
    before = one.call()
    one.positions[0].passed = True
    monkeypatch.setattr(device_calls, "is_capturing", lambda device: True)
    one.positions.clear()
    work = one.call(timeout_ns=1)
    one.positions[0].done = lambda: pytest.fail("a captured event was queried")  # type: ignore[method-assign]
    assert work.done() and work.wait(1 << 62) and one.positions[0].orders == 1
    one.calls.look()
    one.calls.drain()
    assert before.done() and one.calls.failure is None


class EndsAtTheEndOfThePause(threading.Event):
    """An event that is set, as by `CallWatch.close`, at the moment when a wait for the event times out."""

    def __init__(self, watch: CallWatch) -> None:
        super().__init__()
        self._watch = watch

    def wait(self, timeout: float | None = None) -> bool:
        was_set = super().wait(timeout)
        self.set()
        self._watch.wake()
        return was_set


def test_the_watch_ends_whenever_it_is_closed():
    watch = CallWatch()
    watch._closing = EndsAtTheEndOfThePause(watch)
    watch.wake()
    watch._thread.join(10)
    assert not watch._thread.is_alive()


def test_the_watch_goes_on_after_an_error(caplog):
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        raise OSError("the store has lost its connection")

    watch = CallWatch()
    watch.add(stream_on("cpu", look))
    watch.wake()
    wait_until(lambda: len(looks) >= 3)
    watch.close()
    assert caplog.text.count("retrying") == 1, "a lasting error is logged once"


def stream_on(device: str, look: Callable[[], bool] = lambda: False) -> CallStream:
    return SimpleNamespace(look=look, stream=SimpleNamespace(device=torch.device(device)))  # type: ignore[return-value]


def test_more_call_streams_than_streams_are_announced_once(caplog):
    watch = CallWatch()
    for _ in range(32):
        watch.add(stream_on("cuda:0"))
        watch.add(stream_on("cuda:1"))
    assert not caplog.text
    watch.add(stream_on("cuda:0"))
    watch.add(stream_on("cuda:0"))
    watch.close()
    assert caplog.text.count("more than 32 groups and directions of messages are open on cuda:0") == 1
