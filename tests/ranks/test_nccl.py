"""The engine for accelerators on several ranks, over groups of CPU tensors: results and failures."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch_groups
from engines import conformance
from launching import wait_until
from nccl_checks import MOVING, pass_messages

import paceline as dist
from paceline.comm.engine import api


def start(timeout_s: float = 30) -> tuple[int, int]:
    torch_groups.use()
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
    assert dist.get_backend() == "nccl"
    return dist.get_rank(), dist.get_world_size()


def conform_to_the_suite() -> dict[str, str]:
    torch_groups.use()
    return conformance.run_all("nccl")


def test_nccl_conforms_but_for_what_nccl_lacks(ranks):
    for reports in ranks(2)(conform_to_the_suite):
        assert len(reports) > 8
        assert not any(reports.values()), "".join(reports.values())


def move_and_end() -> list[str]:
    rank, size = start()
    for check in MOVING:
        check(rank, size)
    dist.destroy_process_group()
    return torch_groups.CALLS


def test_three_ranks_move_tensors_and_end_their_groups(ranks):
    for rank, calls in enumerate(ranks(3)(move_and_end)):
        # The groups are the default group, the group of ranks 0 and 2, and one for each direction of messages.
        assert calls.count("shutdown") == calls.count("construct") == (3 if rank == 1 else 4)
        assert "abort" not in calls
        assert "allreduce_coalesced" not in calls, "the pieces of a list are one call"


def send_many_tags() -> tuple[int, str]:
    rank, _ = start(timeout_s=10)
    for tag in range(20):
        value = torch.full((2,), float(tag))
        if rank == 0:
            dist.send(value, 1, tag=tag)
        else:
            received = torch.empty(2)
            dist.recv(received, 0, tag=tag)
            assert torch.equal(received, value)
    groups = torch_groups.CALLS.count("construct")
    group = dist.new_group()
    for tags in ((0, 0), (1, 2)):  # the second message is received with a different tag
        other = [torch.ones(2), 1 - rank, tags[rank]]
        (dist.send if rank == 0 else dist.recv)(other[0], other[1], group, tag=other[2])
    wait_until(lambda: failed_text(group, rank) != "")
    dist.barrier()
    return groups, failed_text(group, rank)


def failed_text(group: dist.ProcessGroup, rank: int) -> str:
    try:
        (dist.send if rank == 0 else dist.recv)(torch.ones(2), 1 - rank, group, tag=3)
    except dist.CollectiveError as error:
        return str(error)
    return ""


def test_a_direction_has_one_group_for_all_tags(ranks):
    for groups, text in ranks(2)(send_many_tags):
        assert groups == 2, "the default group's, and one for its messages in this direction"
        assert "sent with 8 bytes of float32 and tag 1, and received with 8 bytes of float32 and tag 2" in text
        assert "in the order in which it sends them" in text


def fail_and_break_the_group() -> dict[str, str]:
    """Each failure breaks a separate group."""
    rank, _ = start()
    errors: dict[str, str] = {}

    def failing(name: str, group: dist.ProcessGroup, **settings: object) -> None:
        with torch_groups.told(**settings), pytest.raises(dist.CollectiveError) as caught:
            dist.all_reduce(torch.ones(3), group=group, async_op=True, timeout=timedelta(seconds=5)).wait()
        errors[name] = str(caught.value)
        with pytest.raises(dist.CollectiveError):
            dist.all_reduce(torch.ones(3), group=group)

    groups = {name: dist.new_group() for name in ("refused", "reported", "late", "different")}
    for group in groups.values():
        dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(TypeError, match=r"all_reduce: .*NCCL.* has no BXOR of torch.int32 .*; convert the tensor"):
            dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BXOR, group)
    failing("refused", groups["refused"], refuses="allreduce")
    failing("reported", groups["reported"], reports="REMOTE_ERROR", loses="allreduce")
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            dist.all_reduce(torch.ones(3), group=groups["late"], timeout=timedelta(seconds=0.5))
        errors["late"] = str(caught.value)
        assert caught.value.missing == (1,)
    dist.barrier()
    call = "reduce" if rank else "allreduce"
    with torch_groups.told(loses=call), pytest.raises(dist.CollectiveMismatchError) as different:
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=groups["different"], timeout=timedelta(seconds=0.5))
        else:
            dist.reduce(torch.ones(4), 0, group=groups["different"], timeout=timedelta(seconds=0.5))
    errors["different"] = str(different.value)
    patient = dist.new_group(timeout=timedelta(minutes=10))
    if rank == 0:
        work = dist.irecv(torch.empty(1), 1, group=patient)
        assert work is not None
        dist.destroy_process_group(patient)  # this does not wait for the other rank
        with pytest.raises(dist.CollectiveError, match="recv.* failed: the group was closed meanwhile"):
            work.wait()
    dist.barrier()
    return errors


def test_failures_say_what_was_seen_and_break_the_group(ranks):
    errors, _ = ranks(2)(fail_and_break_the_group)
    host = os.uname().nodename
    assert errors["refused"].startswith(f"rank 0 ({host}, pid ")
    assert "all_reduce(float32, 3 elements, SUM) failed: ncclInvalidArgument: Invalid value" in errors["refused"]
    assert "NCCL_DEBUG=WARN" in errors["refused"] and "Exception raised from" not in errors["refused"]
    assert re.search(r"while the call was running, NCCL( [\d.]+)? reported REMOTE_ERROR", errors["reported"])
    assert "timed out after " in errors["late"]
    assert f"rank 1 ({host}" in errors["late"]
    assert "did not reach the call" in errors["late"]
    assert "latest all_reduce(float32, 1 elements, SUM) as call 2" in errors["late"]
    assert "all_reduce(float32, 4 elements, SUM) as call 3" in errors["different"]
    assert "reduce(float32, 4 elements, SUM, root 0) as call 3" in errors["different"]


def die_in_a_call() -> str | None:
    rank, _ = start()
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError) as caught:
        dist.all_reduce(torch.ones(3))
    assert caught.value.rank == 1
    return str(caught.value)


def test_a_rank_that_dies_ends_the_others_calls(ranks):
    with ranks(2).start(die_in_a_call) as world:
        text, _ = world.join(60, expect_dead={1})
    assert "died, detected by rank 0" in str(text)


def share_a_gpu() -> str:
    os.environ[torch_groups.GPU_VARIABLE] = "GPU-1"
    with pytest.raises(dist.CollectiveError) as caught:
        start()
    os.environ["PACELINE_NCCL_SHARED_GPU"] = "1"
    return str(caught.value)


def test_two_ranks_on_one_gpu_are_both_told_how_to_take_another(ranks):
    for message in ranks(2)(share_a_gpu):
        assert "rank 0 (" in str(message) and "rank 1 (" in str(message)
        assert "both use one GPU" in str(message)
        assert "torch.cuda.set_device(LOCAL_RANK)" in str(message)


def use_a_backend_of_an_extension() -> None:
    torch.distributed.Backend.register_backend("widget", torch_groups.create_for_extension, devices=["privateuseone"])
    assert api.choose("cpu:paceline,privateuseone:widget").engines == {
        "cpu": "paceline",
        "privateuseone": "widget",
    }
    assert api.engines_for("privateuseone") == ["widget"]
    assert "sees no device" in str(api.missing_piece("widget"))
    api._ENGINES = {**api._ENGINES, "widget": api._Entry("cpu", api._DEVICE_ENGINE)}
    api.require = lambda name, rank: None
    dist.init_process_group("widget")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(size))] * 3
    pass_messages(rank, size)
    dist.destroy_process_group()


def test_a_process_group_of_an_extension_is_an_engine_too(ranks):
    ranks(2)(use_a_backend_of_an_extension)
