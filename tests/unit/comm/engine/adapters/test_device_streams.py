"""Accelerator streams, on a mock whose streams run their work when the test requests it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import paceline
from paceline.comm.engine.adapters import device_streams
from paceline.comm.engine.adapters.device_streams import (
    AcceleratorStream,
    copy_pieces,
    current_accelerator,
    is_capturing,
    memory_at,
)


class QueueEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.passed = False
        self.is_timed = enable_timing

    def record(self, stream: QueueStream) -> None:
        def passes() -> bool:
            self.passed = True
            return True

        stream.jobs.append(passes)

    def query(self) -> bool:
        return self.passed


class QueueStream:
    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.jobs: list[Callable[[], bool]] = []

    def wait_event(self, event: QueueEvent) -> None:
        self.jobs.append(lambda: event.passed)

    def run(self) -> int:
        """Runs jobs up to the first one that must wait; returns the number of remaining jobs."""
        while self.jobs and self.jobs[0]():
            self.jobs.pop(0)
        return len(self.jobs)


class QueueModule:
    """The counterpart of `torch.cuda`, without a context manager for devices."""

    Stream, Event = QueueStream, QueueEvent

    def __init__(self) -> None:
        self.device_index = 1
        self.program = self.now = QueueStream()

    def current_device(self) -> int:
        return self.device_index

    def set_device(self, index: int) -> None:
        self.device_index = index

    def current_stream(self, device: torch.device) -> QueueStream:
        return self.now

    def set_stream(self, stream: QueueStream) -> None:
        self.now = stream

    def is_current_stream_capturing(self) -> bool:
        return self.device_index == 3


@pytest.fixture
def module(monkeypatch):
    stand_in = QueueModule()
    monkeypatch.setattr(device_streams, "_module", lambda device: stand_in)
    return stand_in


def test_streams_wait_for_each_other_without_the_thread(module):
    stream = AcceleratorStream(torch.device("cuda"))
    own = stream._stream
    assert stream.device == torch.device("cuda", 1) and own.priority == -1
    module.program.jobs.append(gate := lambda: bool(opened))
    opened: list[bool] = []
    done: list[str] = []
    stream.follow()
    with stream.current():
        assert module.now is own
        module.now.jobs.append(lambda: done.append("call") is None)
    assert module.now is module.program
    event = stream.record()
    event.order()
    module.program.jobs.append(lambda: done.append("program") is None)
    assert module.program.run() and own.run() and not event.done() and done == []
    opened.append(True)
    assert gate() and module.program.run() and not own.run()
    assert event.done() and done == ["call"]
    assert not module.program.run() and done == ["call", "program"]


def test_another_device_is_current_only_within(module):
    stream = AcceleratorStream(torch.device("cuda", 3), high_priority=False)
    assert stream._stream.priority == 0
    assert module.device_index == 1
    with stream.current():
        assert module.device_index == 3
        assert is_capturing(torch.device("cuda", 3))
    assert module.device_index == 1 and not is_capturing(torch.device("cuda", 1))
    assert is_capturing(torch.device("cuda", 3)) and module.device_index == 1


def test_a_thread_that_only_polls_leaves_captures_alone(module, monkeypatch):
    modes: list[int] = []
    monkeypatch.setattr(device_streams, "_exchange_capture_mode", lambda: lambda mode: modes.append(mode._obj.value))
    event = AcceleratorStream(torch.device("cuda", 3)).record()
    assert not event.done() and modes == [2, 2], "the mode, and the one before"

    def poll() -> None:
        for _ in range(2):
            with device_streams.polled(torch.device("cuda", 3)):
                assert module.device_index == 3 and not event.done() and not event.done()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(poll).result()
    assert modes == [2, 2, 2] and module.device_index == 1


def test_rocms_library_is_the_one_that_torch_has_loaded(tmp_path, monkeypatch):
    """ROCm's library has a version in its name, so no other name would find the loaded one."""
    maps = tmp_path / "maps"
    copy = "/a b/torch/lib/libamdhip64.so.6.4.43484"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 12 {copy}\n7f01-7f02 r--p 00001000 08:01 12 {copy}\n"
        "7f02-7f03 r-xp 00000000 08:01 13 /usr/lib/libc.so.6\n7f03-7f04 rw-p 00000000 00:00 0 [heap]\n"
        "7f05-7f06 rw-p 00000000 00:00 0\n"
    )
    assert device_streams._loaded("libamdhip64.so", maps) == [copy]
    assert device_streams._loaded("libhsa", maps) == device_streams._loaded("libc", tmp_path / "none") == []
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert device_streams._exchange_capture_mode.__wrapped__() is None, "no driver is loaded here"


def test_on_the_cpu_everything_is_done_at_once():
    stream = AcceleratorStream(torch.device("cpu"))
    stream.follow()
    with stream.current():
        target = torch.arange(3.0)
    event = stream.record(timing=True)
    event.order()
    event.wait()
    stream.synchronize()
    assert event.done() and target.tolist() == [0, 1, 2] and not is_capturing(stream.device)
    assert event.elapsed_s(stream.record(timing=True)) == 0


def test_memory_at_an_address_is_a_tensor_without_a_copy():
    owner = torch.arange(6, dtype=torch.int32)
    middle = memory_at(owner.data_ptr() + 4, 12, torch.device("cpu"), torch.int32)
    middle.add_(10)
    assert owner.tolist() == [0, 11, 12, 13, 4, 5]
    assert memory_at(0, 0, torch.device("cpu"), torch.float64).shape == (0,)
    copy_pieces([owner[:2], owner[4:]], [owner[2:4], owner[2:4].clone()])
    assert owner.tolist() == [12, 13, 12, 13, 12, 13]
    copy_pieces([], [])


def test_the_oldest_torch_raises_where_later_ones_return_none(monkeypatch):
    def raises() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert current_accelerator() is None
    assert device_streams.accelerator_in_use() is None


def test_nothing_else_asks_torch_for_the_accelerator():
    package = Path(paceline.__file__).parent
    callers = [path for path in package.rglob("*.py") if "accelerator.current_accelerator(" in path.read_text()]
    assert [path.name for path in callers] == ["device_streams.py"]
