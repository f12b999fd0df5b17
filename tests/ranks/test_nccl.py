"""The nccl engine on several ranks, over a library that moves CPU tensors: what it computes, and how it fails."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import nccl_stub
import pytest
import torch
from values import COMPLEX, FLOATS, INTEGERS, expected, make, supported

import paceline as dist
from paceline import ReduceOp

MISSING = {torch.int16}
MISSING_OPS = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}


def start(library: Path, folder: Path, timeout_s: float = 30) -> tuple[int, int]:
    nccl_stub.use(library, folder, folder / f"log{os.environ['RANK']}")
    dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_s))
    assert dist.get_backend() == "nccl"
    return dist.get_rank(), dist.get_world_size()


def nccl_has(dtype: torch.dtype, op: ReduceOp) -> bool:
    if dtype is torch.bool:
        return op is not ReduceOp.BXOR
    if dtype in COMPLEX:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    return dtype not in MISSING and op not in MISSING_OPS


def reduce_everything(rank: int, size: int) -> None:
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in supported(dtype):
            for count in (0, 1, 1001):
                tensor = make(dtype, count, rank)
                if not nccl_has(dtype, op):
                    with pytest.raises(TypeError, match=rf"NCCL 2.21.5 has no {op.name} of {dtype}; convert"):
                        dist.all_reduce(tensor, op)
                    continue
                wanted = expected(op, [make(dtype, count, r) for r in range(size)])
                dist.all_reduce(tensor, op)
                torch.testing.assert_close(tensor, wanted)
    inputs = [make(torch.float32, 9, 10 * r + rank) for r in range(size)]
    output = torch.empty(9)
    dist.reduce_scatter(output, inputs)
    wanted = sum(make(torch.float32, 9, 10 * rank + r) for r in range(size))
    torch.testing.assert_close(output, wanted)
    dist.reduce_scatter_tensor(output, torch.cat(inputs), ReduceOp.AVG)
    torch.testing.assert_close(output, wanted / size)
    for root in range(size):
        tensor = make(torch.float64, 5, rank)
        dist.reduce(tensor, root)
        sum_of_all = expected(ReduceOp.SUM, [make(torch.float64, 5, r) for r in range(size)])
        torch.testing.assert_close(tensor, sum_of_all if rank == root else make(torch.float64, 5, rank))
    scaled = torch.full((3,), rank + 1.0)
    dist.all_reduce(scaled, dist.PremulSum(0.5))
    assert scaled.tolist() == [size * (size + 1) / 4] * 3
    transposed = make(torch.float32, 12, rank).view(3, 4).t()
    dist.all_reduce(transposed)
    torch.testing.assert_close(
        transposed, expected(ReduceOp.SUM, [make(torch.float32, 12, r) for r in range(size)]).view(3, 4).t()
    )


def move_everything(rank: int, size: int) -> None:
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex128, torch.float8_e4m3fn):
        for count in (0, 3, 40_000):
            shared = torch.float32 if dtype is torch.float8_e4m3fn else dtype
            everybodys = [make(shared, count, r).to(dtype) for r in range(size)]

            def same(a: torch.Tensor, b: torch.Tensor) -> None:
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

            mine = everybodys[rank].clone()
            gathered = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(gathered, mine)
            for theirs, wanted in zip(gathered, everybodys, strict=True):
                same(theirs, wanted)
            whole = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            same(whole, torch.cat([each.view(torch.uint8) for each in everybodys]).view(dtype))
            for root in range(size):
                tensor = mine.clone()
                dist.broadcast(tensor, root)
                same(tensor, everybodys[root])
                lists = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
                dist.gather(mine, lists, dst=root)
                for theirs, wanted in zip(lists or [], everybodys, strict=False):
                    same(theirs, wanted)
                dist.scatter(tensor, everybodys if rank == root else None, src=root)
                same(tensor, mine)
    sent = [torch.full((1 + rank + r,), 10.0 * rank + r) for r in range(size)]
    received = [torch.empty(1 + rank + r) for r in range(size)]
    dist.all_to_all(received, sent)
    assert [each.tolist() for each in received] == [[10.0 * r + rank] * (1 + rank + r) for r in range(size)]
    dist.barrier()


def coalesce(rank: int, size: int) -> None:
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 4, 0, 7)]
    dist.all_reduce_coalesced(tensors)
    assert all(each.eq(size * (size + 1) / 2).all() for each in tensors)
    pieces = [torch.full((2,), float(rank)), torch.full((3,), rank + 0.5)]
    gathered = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(gathered, pieces)
    assert [each[1].tolist() for each in gathered] == [[r + 0.5] * 3 for r in range(size)]
    told: list[object] = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": r} for r in range(size)]


def run_beside(rank: int, size: int) -> None:
    works = [dist.all_reduce(torch.full((3,), float(i)), async_op=True) for i in range(4)]
    for i, work in enumerate(works):
        assert work is not None
        assert work.wait()
        assert work.result()[0].tolist() == [float(i * size)] * 3
    later = dist.all_reduce(torch.ones(2), async_op=True)
    assert later is not None
    assert later.get_future().wait()[0].tolist() == [size, size]


def pass_messages(rank: int, size: int) -> None:
    """Everybody sends before anybody receives, with tags out of order."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((50_000,), 10.0 * rank + tag), after, tag=tag) for tag in (0, 1)]
    received = {tag: torch.empty(50_000) for tag in (1, 0)}
    for tag, tensor in received.items():
        work = dist.irecv(tensor, before, tag=tag)
        assert work is not None
        work.wait()
        assert work.source_rank() == before
    for work in sends:
        work.wait()
    assert all(tensor.eq(10.0 * before + tag).all() for tag, tensor in received.items())
    with pytest.raises(ValueError, match="recv from any rank: NCCL receives from one that is named; pass src="):
        dist.recv(torch.empty(1))


def use_groups(rank: int, size: int) -> None:
    group = dist.new_group([2, 0])
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == ([2.0, 2.0] if rank in (0, 2) else [1.0, 1.0])
    with pytest.raises(ValueError, match="the algorithm is 'ring', and nccl chooses its own"):
        dist.new_group(algorithm="ring")


def train(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = dist.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), overlap=True
    )
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    inputs = torch.randn(size, 3)
    reference(inputs).sum().backward()
    model(inputs[rank : rank + 1]).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad * size, theirs.grad)


def do_everything(library: Path, folder: Path) -> None:
    rank, size = start(library, folder)
    for check in (reduce_everything, move_everything, coalesce, run_beside, pass_messages, use_groups, train):
        check(rank, size)
    dist.destroy_process_group()


def test_everything_that_a_group_can_do_is_done_over_nccl(ranks, nccl_library, tmp_path):
    ranks(3)(do_everything, nccl_library, tmp_path)
    calls = (tmp_path / "log0").read_text().splitlines()
    assert calls.count("ncclCommFinalize") == calls.count("ncclCommDestroy") > 0
    assert "ncclCommAbort" not in calls
    # The pieces of a list go in one group.
    assert sum(call.startswith("ncclAllReduce count=7 type=7 op=0 peer=-1 depth=1") for call in calls) == 1


def fail(library: Path, folder: Path) -> dict[str, str]:
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

    groups = {name: dist.new_group() for name in ("refused", "asynchronous", "late")}
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
    return told


def test_failures_say_what_was_seen_and_break_the_group(ranks, nccl_library, tmp_path):
    told, _ = ranks(2)(fail, nccl_library, tmp_path)
    host = os.uname().nodename
    assert told["refused"].startswith(f"rank 0 ({host}, pid ")
    assert "all_reduce(float32, 3 elements, SUM) failed: all_reduce: invalid argument" in told["refused"]
    assert "NCCL_DEBUG=WARN" in told["refused"]
    assert "while the call was under way: an error" in told["asynchronous"]
    assert "was given up after " in told["late"]
    assert f"rank 1 ({host}" in told["late"]
    assert "did not come" in told["late"]
    assert "latest all_reduce(float32, 1 elements, SUM) as call 1" in told["late"]


def die(library: Path, folder: Path) -> str | None:
    rank, _ = start(library, folder)
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError) as caught:
        dist.all_reduce(torch.ones(3))
    assert caught.value.rank == 1
    return str(caught.value)


def test_a_rank_that_dies_ends_the_others_calls(ranks, nccl_library, tmp_path):
    with ranks(2).start(die, nccl_library, tmp_path) as world:
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
