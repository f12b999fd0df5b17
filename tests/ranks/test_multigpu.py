"""Collectives in processes with several devices each; CPU tensors emulate the devices."""

from __future__ import annotations

import pytest
import torch

import paceline as dist
from paceline import PremulSum, ReduceOp

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COUNT = 5003


def make(dtype: torch.dtype, member: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(member)
    if dtype is torch.bool:
        return torch.randint(0, 2, (COUNT,), generator=generator).bool()
    if dtype in INTEGERS:
        bits = torch.randint(0, 256, (COUNT * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return bits.view(dtype)
    return torch.randn(COUNT, generator=generator, dtype=torch.float64).to(dtype)


def supported(dtype: torch.dtype) -> list[ReduceOp]:
    arithmetic = [ReduceOp.SUM, ReduceOp.PRODUCT]
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG]
    if dtype.is_floating_point:
        return [*arithmetic, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX]
    average = [] if dtype is torch.bool else [ReduceOp.AVG]
    return [*arithmetic, *average, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def reduced_by_four_ranks(results_file: str) -> None:
    dist.init_process_group()
    results = {}
    for dtype in [torch.bool, *INTEGERS, *FLOATS]:
        for op in supported(dtype):
            tensor = make(dtype, dist.get_rank())
            dist.all_reduce(tensor, op)
            results[dtype, int(op)] = tensor
    if dist.get_rank() == 0:
        torch.save(results, results_file)


def reduced_by_two_ranks(results_file: str, async_op: bool) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for (dtype, number), wanted in torch.load(results_file).items():
        op = ReduceOp(number)
        tensors = [make(dtype, 2 * rank + j) for j in range(2)]
        work = dist.all_reduce_multigpu(tensors, op, async_op=async_op)
        assert (work is not None) == async_op
        assert work is None or work.get_future().wait()[1] is tensors[1]
        for tensor in tensors:
            assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), (dtype, op)


@pytest.mark.parametrize("async_op", [False, True])
def test_two_ranks_of_two_tensors_reduce_to_the_bits_of_four(ranks, async_op, tmp_path):
    results_file = str(tmp_path / "results")
    ranks(4)(reduced_by_four_ranks, results_file)
    ranks(2)(reduced_by_two_ranks, results_file, async_op)


def member_tensors(rank: int, n: int) -> list[torch.Tensor]:
    return [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + j)) for j in range(n)]


def every_form(async_op: bool) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    n = 3

    def call(function, *args, **kwargs):
        work = function(*args, async_op=async_op, **kwargs)
        if work is not None:
            work.wait()

    everyone = [tensor for r in range(size) for tensor in member_tensors(r, n)]
    root = size - 1

    tensors = member_tensors(rank, n)
    call(dist.broadcast_multigpu, tensors, root, src_tensor=2)
    assert all(torch.equal(tensor, everyone[root * n + 2]) for tensor in tensors)

    tensors = member_tensors(rank, n)
    call(dist.reduce_multigpu, tensors, root, dst_tensor=1)
    for j, (tensor, before) in enumerate(zip(tensors, member_tensors(rank, n), strict=True)):
        if rank == root and j == 1:
            torch.testing.assert_close(tensor, sum(everyone))
        else:
            assert torch.equal(tensor, before)

    tensors = member_tensors(rank, n)
    call(dist.all_reduce_multigpu, tensors, PremulSum(rank + 1.0))
    wanted = sum(each * (at // n + 1.0) for at, each in enumerate(everyone))
    torch.testing.assert_close(tensors[0], wanted)
    assert torch.equal(tensors[0], tensors[2])

    outputs = [[torch.empty(3, 4) for _ in range(size * n)] for _ in range(n)]
    call(dist.all_gather_multigpu, outputs, member_tensors(rank, n))
    for each in outputs:
        assert all(map(torch.equal, each, everyone))

    def inputs(r: int) -> list[list[torch.Tensor]]:
        return [[(each + at) * (i + 1) for at, each in enumerate(everyone)] for i in range(r, r + n)]

    for op in (ReduceOp.SUM, ReduceOp.AVG):
        scattered = [torch.empty(3, 4) for _ in range(n)]
        call(dist.reduce_scatter_multigpu, scattered, inputs(rank), op)
        for j, output in enumerate(scattered):
            wanted = sum(each[rank * n + j] for r in range(size) for each in inputs(r))
            torch.testing.assert_close(output, wanted / (size * n) if op is ReduceOp.AVG else wanted)

    # The ranks have different numbers of tensors; the average is over all tensors.
    tensors = [torch.full((2, 2), float(rank)).t() for _ in range(1 + rank)]
    call(dist.all_reduce_multigpu, tensors, ReduceOp.AVG)
    wanted = sum(r * (r + 1) for r in range(size)) / sum(r + 1 for r in range(size))
    assert all(torch.allclose(each, torch.full((2, 2), wanted)) for each in tensors)
    counted = [torch.tensor([rank, -rank], dtype=torch.int16) for _ in range(1 + rank)]
    call(dist.all_reduce_multigpu, counted, ReduceOp.AVG)
    assert all(each.tolist() == [int(wanted), -int(wanted)] for each in counted)


@pytest.mark.parametrize(("size", "async_op"), [(1, False), (2, False), (3, True)])
def test_every_tensor_is_a_member(ranks, size, async_op):
    ranks(size)(every_form, async_op)


def give_lists_that_do_not_fit() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    one = torch.ones(1)
    with pytest.raises(ValueError, match="tensor_list is empty; it must be a list of tensors, one for each device"):
        dist.all_reduce_multigpu([])
    with pytest.raises(
        ValueError, match=r"tensor_list\[1\] has 2 elements of .*float32, .*must have the same size and type"
    ):
        dist.all_reduce_multigpu([one, torch.ones(2)])
    with pytest.raises(ValueError, match="src_tensor is 1; tensor_list has tensors 0 to 0"):
        dist.broadcast_multigpu([one], 0, src_tensor=1)
    with pytest.raises(ValueError, match="dst_tensor is -1"):
        dist.reduce_multigpu([one], 0, dst_tensor=-1)
    with pytest.raises(ValueError, match=r"lists of the lengths \[1, 2\]; with 2 devices per rank and 2 in total"):
        dist.all_gather_multigpu([[one], [one, one]], [one, one])
    with pytest.raises(TypeError, match="AVG is not defined for torch.bool"):
        dist.all_reduce_multigpu([torch.ones(1, dtype=torch.bool)] * 2, ReduceOp.AVG)


def test_lists_that_do_not_fit_are_refused(ranks):
    ranks(1)(give_lists_that_do_not_fit)
