"""PyTorch's process groups without torch.distributed: settings, shutdown, and missing requirements."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

import paceline as dist
from paceline.comm.engine import api
from paceline.comm.engine.torch_backend import process_groups
from paceline.comm.engine.torch_backend.device_engine import missing_piece
from paceline.comm.engine.torch_backend.process_groups import OwnedProcessGroup, TorchStore, run_bounded


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch has CUDA")
def test_without_cuda_the_engine_names_the_torch_that_is_needed():
    assert "built without CUDA or ROCm" in str(missing_piece("nccl"))
    assert not dist.is_nccl_available()
    with pytest.raises(ValueError, match=r"rank 0: backend 'nccl' cannot be used: this torch .* without CUDA"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def test_torch_without_nccl_or_without_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.distributed.distributed_c10d.is_nccl_available", lambda: False)
    assert "was built without NCCL" in str(missing_piece("nccl"))
    monkeypatch.setattr("torch.distributed.distributed_c10d.is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "torch sees no GPU" in str(missing_piece("nccl"))
    assert "import the extension that registers it" in str(missing_piece("hccl"))
    with pytest.raises(ValueError, match="backend 'hccl' is not known"):
        api.choose("hccl")


def test_the_watchdog_is_off_for_our_groups_only(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as launchers set it
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    with process_groups._without_watchdog():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
        assert "NCCL_BLOCKING_WAIT" not in os.environ
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["NCCL_BLOCKING_WAIT"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


class RecordedNccl:
    """Replaces `ProcessGroupNCCL`, with its signature in PyTorch 2.6 to 2.15."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    def __init__(self, store: c10d.Store, rank: int, size: int, options: Options) -> None:
        self.made_with = (store, rank, size, options._timeout)
        # as in the constructor of PyTorch's class
        desync = os.environ.get("TORCH_NCCL_DESYNC_DEBUG", "0") == "1"
        self.is_watched = desync or int(torch.distributed.get_debug_level()) >= 2
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_a_group_for_nccl_is_of_torchs_own_class(monkeypatch):
    """PyTorch 2.15 registers a function whose groups are bound to the device LOCAL_RANK."""
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", RecordedNccl, raising=False)
    plugin = c10d.Backend._BackendPlugin(lambda *_: pytest.fail("the registered function was called"), True)
    monkeypatch.setitem(c10d.Backend._plugins, "NCCL", plugin)
    store = TorchStore(dist.HashStore())
    made = process_groups.construct("nccl", store, 1, 2)
    assert made.group.made_with == (store, 1, 2, process_groups.NEVER)


def test_the_watchdog_stays_off_while_torch_is_debugged(monkeypatch):
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", RecordedNccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DESYNC_DEBUG", "1")
    before = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    try:
        assert not process_groups.construct("nccl", TorchStore(dist.HashStore()), 0, 1).group.is_watched
        assert torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL
    finally:
        torch.distributed.set_debug_level(before)
    assert os.environ["TORCH_NCCL_DESYNC_DEBUG"] == "1"


@pytest.mark.skipif(not hasattr(c10d.Store, "clone"), reason="this torch does not clone stores")
def test_torch_can_clone_the_store_of_a_group():
    store = TorchStore(dist.HashStore(), "group/")
    copy = c10d.PrefixStore("p", store).clone()
    copy.set("key", b"value")
    assert store.get("p/key") == b"value"


def test_a_function_that_never_ends_is_left_behind():
    gate = threading.Event()
    started = time.monotonic()
    assert not run_bounded(gate.wait, time.monotonic() + 0.05, "test")
    assert not run_bounded(gate.wait, time.monotonic() + 60, "test", lambda: True)
    gate.set()
    assert run_bounded(gate.wait, time.monotonic() + 60, "test") and time.monotonic() - started < 30
    with pytest.raises(ZeroDivisionError):
        run_bounded(lambda: 1 // 0, time.monotonic() + 60, "test")


def test_a_group_is_ended_once_and_aborted_if_it_does_not_end():
    ends: list[str] = []
    gate = threading.Event()

    def shutdown() -> None:
        ends.append("shutdown")
        gate.wait()

    group = OwnedProcessGroup(SimpleNamespace(shutdown=shutdown, abort=lambda: ends.append("abort")), None)
    assert group.error() is None, "a release that reports no errors"
    assert not group.shut_down(time.monotonic() + 0.05, lambda: False)
    group.abort()
    assert ends == ["shutdown", "abort"] and group.shut_down(0, lambda: False)
    gate.set()


def test_a_group_is_aborted_even_if_its_device_has_failed(monkeypatch):
    """Otherwise, the other ranks would wait until this process exits."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(process_groups, "activated", fail)
    ends: list[str] = []
    OwnedProcessGroup(SimpleNamespace(abort=lambda: ends.append("abort")), torch.distributed.HashStore()).abort()
    assert ends == ["abort"]


def test_groups_of_the_oldest_torch_are_shut_down_and_aborted():
    ends: list[str] = []
    for end in (lambda group: group.shut_down(time.monotonic() + 60, lambda: False), OwnedProcessGroup.abort):
        methods = {f"_{name}": lambda name=name: ends.append(name) for name in ("shutdown", "abort")}
        end(OwnedProcessGroup(SimpleNamespace(**methods), None))
    assert ends == ["shutdown", "abort"]


def test_a_stores_limit_holds_for_all_waiting():
    store = TorchStore(dist.HashStore(), "group/", time.monotonic() + 0.1)
    started = time.monotonic()
    with pytest.raises(dist.StoreTimeoutError):
        store.get("id")
    assert time.monotonic() - started < 30
    store.set("id", b"value")
    assert store.get("id") == b"value" and store.check(["id"]) and store.add("n", 2) == 2
    store.wait(["id"])
    assert store.delete_key("id") and not store.check(["id"])
