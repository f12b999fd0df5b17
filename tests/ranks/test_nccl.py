"""The nccl engine on several ranks, over a library that moves CPU tensors: what it computes, and how it fails."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import nccl_stub
import pytest
import torch
from engines import conformance
from nccl_checks import CHECKS

import paceline as dist


def start(library: Path, folder: Path, timeout_s: float = 30) -> tuple[int, int]:
    nccl_stub.use(library, folder, folder / f"log{os.environ['RANK']}")
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
    assert dist.get_backend() == "nccl"
    return dist.get_rank(), dist.get_world_size()


def do_everything(library: Path, folder: Path) -> None:
    rank, size = start(library, folder)
    for check in CHECKS:
        check(rank, size)
    dist.destroy_process_group()


def test_everything_that_a_group_can_do_is_done_over_nccl(ranks, nccl_library, tmp_path):
    ranks(3)(do_everything, nccl_library, tmp_path)
    calls = (tmp_path / "log0").read_text().splitlines()
    assert calls.count("ncclCommFinalize") == calls.count("ncclCommDestroy") > 0
    assert "ncclCommAbort" not in calls
    # The pieces of a list go in one group.
    assert sum(call.startswith("ncclAllReduce count=7 type=7 op=0 peer=-1 depth=1") for call in calls) == 1


def conform_to_the_suite(library: Path, folder: Path) -> dict[str, str]:
    nccl_stub.use(library, folder)
    return conformance.run_all("nccl")


def test_nccl_conforms_but_for_what_nccl_lacks(ranks, nccl_library, tmp_path):
    for reports in ranks(2)(conform_to_the_suite, nccl_library, tmp_path):
        assert len(reports) > 8
        assert not any(reports.values()), "".join(reports.values())


def fail_and_break_the_group(library: Path, folder: Path) -> dict[str, str]:
    """Each failure breaks a group of its own."""
    rank, _ = start(library, folder)
    told: dict[str, str] = {}

    def failing(name: str, group: object, **settings: object) -> None:
        with nccl_stub.told(**settings):
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True, timeout=timedelta(seconds=5))
            assert work is not None
            with pytest.raises(dist.CollectiveError) as caught:
                work.wait()
        told[name] = str(caught.value)
        with pytest.raises(dist.CollectiveError):
            dist.all_reduce(torch.ones(3), group=group)

    groups = {name: dist.new_group() for name in ("refused", "asynchronous", "late", "different")}
    for group in groups.values():
        dist.all_reduce(torch.ones(1), group=group)
    failing("refused", groups["refused"], refuses="ncclAllReduce")
    failing("asynchronous", groups["asynchronous"], async_error=6, loses="ncclAllReduce")
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=groups["late"], async_op=True, timeout=timedelta(seconds=0.5))
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            work.wait()
        told["late"] = str(caught.value)
        assert caught.value.missing == (1,)
    dist.barrier()
    call = "ncclReduce" if rank else "ncclAllReduce"
    with nccl_stub.told(loses=call), pytest.raises(dist.CollectiveMismatchError) as different:
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=groups["different"], timeout=timedelta(seconds=0.5))
        else:
            dist.reduce(torch.ones(4), 0, group=groups["different"], timeout=timedelta(seconds=0.5))
    told["different"] = str(different.value)
    patient = dist.new_group(timeout=timedelta(minutes=10))
    if rank == 0:
        work = dist.irecv(torch.empty(1), 1, group=patient)
        assert work is not None
        dist.destroy_process_group(patient)  # does not wait for the other rank
        with pytest.raises(dist.CollectiveError, match="recv.* failed: the group was closed meanwhile"):
            work.wait()
    dist.barrier()
    return told


def test_failures_say_what_was_seen_and_break_the_group(ranks, nccl_library, tmp_path):
    told, _ = ranks(2)(fail_and_break_the_group, nccl_library, tmp_path)
    host = os.uname().nodename
    assert told["refused"].startswith(f"rank 0 ({host}, pid ")
    assert "all_reduce(float32, 3 elements, SUM) failed: all_reduce: invalid argument" in told["refused"]
    assert "NCCL_DEBUG=WARN" in told["refused"]
    assert "while the call was under way: an error" in told["asynchronous"]
    assert "timed out after " in told["late"]
    assert f"rank 1 ({host}" in told["late"]
    assert "did not come" in told["late"]
    assert "latest all_reduce(float32, 1 elements, SUM) as call 2" in told["late"]
    assert "all_reduce(float32, 4 elements, SUM) as call 3" in told["different"]
    assert "reduce(float32, 4 elements, SUM, root 0) as call 3" in told["different"]


def die_in_a_call(library: Path, folder: Path) -> str | None:
    rank, _ = start(library, folder)
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError) as caught:
        dist.all_reduce(torch.ones(3))
    assert caught.value.rank == 1
    return str(caught.value)


def test_a_rank_that_dies_ends_the_others_calls(ranks, nccl_library, tmp_path):
    with ranks(2).start(die_in_a_call, nccl_library, tmp_path) as world:
        told, _ = world.join(60, expect_dead={1})
    assert "died, seen by rank 0" in str(told)


def share_a_gpu(library: Path, folder: Path, with_leave: bool) -> str | None:
    os.environ[nccl_stub.GPU_VARIABLE] = "GPU-1"
    if with_leave:
        os.environ["PACELINE_NCCL_SHARED_GPU"] = "1"
        start(library, folder)
        dist.all_reduce(torch.ones(3))
        return None
    with pytest.raises(dist.CollectiveError) as caught:
        start(library, folder)
    return str(caught.value)


def test_two_ranks_on_one_gpu_are_both_told_how_to_take_another(ranks, nccl_library, tmp_path):
    for message in ranks(2)(share_a_gpu, nccl_library, tmp_path, False):
        assert "rank 0 (" in str(message) and "rank 1 (" in str(message)
        assert "both use one GPU" in str(message)
        assert "torch.cuda.set_device(LOCAL_RANK)" in str(message)
    ranks(2)(share_a_gpu, nccl_library, tmp_path, True)
