"""Checks the results of the nccl engine on any type of default device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from values import COMPLEX, FLOATS, INTEGERS, expected, make, supported

import paceline as dist
from paceline import ReduceOp
from paceline.comm.engine.torch_backend.process_groups import version_of

HALF = (torch.float16, torch.bfloat16)
Check = Callable[[int, int], None]
"""Takes the rank and the number of ranks."""

MISSING = {torch.int16}
MISSING_OPS = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}


def made(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    return make(dtype, count, rank).to(torch.get_default_device())


def nccl_has(dtype: torch.dtype, op: ReduceOp) -> bool:
    if dtype is torch.bool:
        return op is not ReduceOp.BXOR
    if dtype in COMPLEX:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    return dtype not in MISSING and op not in MISSING_OPS


def reduce_everything(rank: int, size: int) -> None:
    version = version_of("nccl")
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in supported(dtype):
            for count in (0, 1, 1001):
                tensor = made(dtype, count, rank)
                if not nccl_has(dtype, op):
                    with pytest.raises(TypeError, match=rf"{version} has no {op.name} of {dtype} .*; convert"):
                        dist.all_reduce(tensor, op)
                    continue
                wanted = expected(op, [made(dtype, count, r) for r in range(size)])
                dist.all_reduce(tensor, op)
                if dtype in HALF and size > 2:  # NCCL rounds every partial sum, in an order of its own
                    torch.testing.assert_close(tensor, wanted, rtol=0.02, atol=0.02)
                else:
                    torch.testing.assert_close(tensor, wanted)
    inputs = [made(torch.float32, 9, 10 * r + rank) for r in range(size)]
    output = torch.empty(9)
    dist.reduce_scatter(output, inputs)
    wanted = sum(made(torch.float32, 9, 10 * rank + r) for r in range(size))
    torch.testing.assert_close(output, wanted)
    dist.reduce_scatter_tensor(output, torch.cat(inputs), ReduceOp.AVG)
    torch.testing.assert_close(output, wanted / size)
    for root in range(size):
        tensor = made(torch.float64, 5, rank)
        dist.reduce(tensor, root)
        sum_of_all = expected(ReduceOp.SUM, [made(torch.float64, 5, r) for r in range(size)])
        torch.testing.assert_close(tensor, sum_of_all if rank == root else made(torch.float64, 5, rank))
    scaled = torch.full((3,), rank + 1.0)
    dist.all_reduce(scaled, dist.PremulSum(0.5))
    assert scaled.tolist() == [size * (size + 1) / 4] * 3
    transposed = made(torch.float32, 12, rank).view(3, 4).t()
    dist.all_reduce(transposed)
    torch.testing.assert_close(
        transposed, expected(ReduceOp.SUM, [made(torch.float32, 12, r) for r in range(size)]).view(3, 4).t()
    )


def move_everything(rank: int, size: int) -> None:
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex128, torch.float8_e4m3fn):
        for count in (0, 3, 40_000):
            shared = torch.float32 if dtype is torch.float8_e4m3fn else dtype
            everybodys = [made(shared, count, r).to(dtype) for r in range(size)]

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
    with torch.device("meta"):  # objects are not sent on the program's default device
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
    """Every rank sends all its messages, and then receives messages in the order in which they were sent."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((50_000,), 10.0 * rank + tag), after, tag=tag) for tag in (0, 1)]
    received = {tag: torch.empty(50_000) for tag in (0, 1)}
    for tag, tensor in received.items():
        work = dist.irecv(tensor, before, tag=tag)
        assert work is not None
        work.wait()
        assert work.source_rank() == before
    for work in sends:
        work.wait()
    assert all(tensor.eq(10.0 * before + tag).all() for tag, tensor in received.items())
    with pytest.raises(ValueError, match="recv from any rank: NCCL can only receive from a specified rank; pass src="):
        dist.recv(torch.empty(1))


def use_groups(rank: int, size: int) -> None:
    group = dist.new_group([2, 0])
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == ([2.0, 2.0] if rank in (0, 2) else [1.0, 1.0])
    with pytest.raises(ValueError, match="the algorithm is 'ring', but nccl chooses its own"):
        # With a mixed backend, the first call on a device creates the group's communicator for that device.
        dist.all_reduce(torch.ones(1), group=dist.new_group(algorithm="ring"))


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


MOVING = (move_everything, coalesce, run_beside, pass_messages, use_groups, train)
CHECKS = (reduce_everything, *MOVING)
