"""The collectives on real processes, compared with computed values."""

from __future__ import annotations

import pytest
import torch
from one_world import OneWorld
from values import COMPLEX, COUNTS, FLOATS, INTEGERS, expected, make, supported

import paceline as dist
from paceline import ReduceOp


def all_reduce_every_type() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in supported(dtype):
            for count in COUNTS:
                tensor = make(dtype, count, rank)
                dist.all_reduce(tensor, op)
                wanted = expected(op, [make(dtype, count, r) for r in range(size)])
                inexact = (*COMPLEX, torch.bfloat16, torch.float16) if op is ReduceOp.PRODUCT else COMPLEX
                if dtype in inexact and op in (ReduceOp.PRODUCT, ReduceOp.AVG):
                    torch.testing.assert_close(tensor, wanted)
                else:
                    assert torch.equal(tensor, wanted), (dtype, op, count)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_follows_the_tree_for_every_type(ranks, size):
    ranks(size)(all_reduce_every_type)


def move_everything() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in [torch.bool, torch.int16, torch.float32, torch.complex128, torch.float8_e4m3fn]:
        for count in [0, 3, 50_000]:

            def sent(r, dtype=dtype, count=count):
                return (
                    make(torch.float32, count, r).to(dtype) if dtype is torch.float8_e4m3fn else make(dtype, count, r)
                )

            def same(a, b):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

            for root in {0, size - 1}:
                tensor = sent(rank)
                dist.broadcast(tensor, root)
                same(tensor, sent(root))

                gathered = [torch.empty_like(tensor) for _ in range(size)] if rank == root else None
                dist.gather(sent(rank), gathered, dst=root)
                for r in range(size if rank == root else 0):
                    same(gathered[r], sent(r))

                scattered = torch.empty_like(tensor)
                dist.scatter(scattered, [sent(10 * r) for r in range(size)] if rank == root else None, src=root)
                same(scattered, sent(10 * rank))

            outputs = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(outputs, sent(rank))
            for r in range(size):
                same(outputs[r], sent(r))
            whole = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, sent(rank))
            same(whole, torch.cat([sent(r).view(torch.uint8) for r in range(size)]).view(dtype))

            dist.all_to_all(outputs, [sent(100 * rank + r) for r in range(size)])
            for r in range(size):
                same(outputs[r], sent(100 * r + rank))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensors_of_every_kind_are_moved_unchanged(ranks, size):
    ranks(size)(move_everything)


def reduce_and_reduce_scatter() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in [0, 5, 100_000]:
        for dtype in [torch.float32, torch.bfloat16, torch.int64]:
            values = [make(dtype, count, r) for r in range(size)]
            tensor = values[rank].clone()
            dist.reduce(tensor, dst=size - 1)
            assert torch.equal(tensor, expected(ReduceOp.SUM, values) if rank == size - 1 else values[rank])

            inputs = [make(dtype, count, 10 * rank + r) for r in range(size)]
            output = torch.empty(count, dtype=dtype)
            dist.reduce_scatter(output, inputs, ReduceOp.MAX)
            wanted = expected(ReduceOp.MAX, [make(dtype, count, 10 * r + rank) for r in range(size)])
            assert torch.equal(output, wanted)
            dist.reduce_scatter_tensor(output, torch.cat(inputs), ReduceOp.MAX)
            assert torch.equal(output, wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_only_the_owner_of_a_result_receives_it(ranks, size):
    ranks(size)(reduce_and_reduce_scatter)


def splits_of_several_lengths() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows_in = [(rank + r) % size * 40_000 for r in range(size)]
    source = torch.cat([torch.full((n, 2), 10.0 * rank + r) for r, n in enumerate(rows_in)])
    output = torch.empty(sum(rows_in), 2)
    dist.all_to_all_single(output, source, rows_in, rows_in)
    wanted = torch.cat([torch.full((n, 2), 10.0 * r + rank) for r, n in enumerate(rows_in)])
    assert torch.equal(output, wanted)


def a_pair_that_disagrees() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = [torch.empty(1 if (rank, r) == (0, 1) else 2) for r in range(size)]
    with pytest.raises(dist.CollectiveMismatchError, match=r"rank 1 .* sends 8 bytes to rank 0 .* expects 4"):
        dist.all_to_all(wrong, [torch.empty(2) for _ in range(size)])
    dist.barrier()


ALL_TO_ALL = OneWorld(splits_of_several_lengths, a_pair_that_disagrees)


def test_all_to_all_exchanges_splits_of_several_lengths():
    ALL_TO_ALL.require(3, "splits_of_several_lengths")


def test_a_pair_that_disagrees_about_a_length_is_named():
    ALL_TO_ALL.require(3, "a_pair_that_disagrees")


def uneven_parts(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns a tensor for each of three ranks, one of which is empty and one of which is strided."""
    values = (torch.arange(80_002 + 12) % 7 + rank).to(dtype)
    return [values[:80_002].view(2, -1), values[:0], values[80_002:].view(4, 3).t()]


def a_gather_of_uneven_tensors() -> None:
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool):
        sent = [uneven_parts(r, dtype)[r] for r in range(3)]
        for async_op in (False, True):
            received = [torch.zeros_like(tensor) for tensor in sent]
            work = dist.all_gather(received, sent[rank], async_op=async_op)
            assert work is None or (work.wait() and all(map(torch.equal, work.result(), received)))
            assert all(map(torch.equal, received, sent))
    persistent = dist.all_gather_init(received := [torch.zeros_like(tensor) for tensor in sent], sent[rank])
    persistent()
    assert all(map(torch.equal, received, sent))


def a_reduce_scatter_of_uneven_parts() -> None:
    rank = dist.get_rank()
    for dtype, op in [
        (torch.float32, ReduceOp.SUM),
        (torch.float64, ReduceOp.AVG),
        (torch.bfloat16, ReduceOp.MAX),
        (torch.int64, ReduceOp.PRODUCT),
        (torch.complex64, ReduceOp.SUM),
        (torch.float32, dist.PremulSum(0.5)),
    ]:
        inputs = uneven_parts(rank, dtype)
        before = [tensor.clone() for tensor in inputs]
        for async_op in (False, True):
            for r, tensor in enumerate(wanted := [tensor.clone() for tensor in inputs]):
                dist.all_reduce(wanted[r] if tensor.numel() else torch.empty(0, dtype=dtype), op)
            output = torch.zeros_like(inputs[rank])
            work = dist.reduce_scatter(output, inputs, op, async_op=async_op)
            assert work is None or (work.wait() and torch.equal(work.result()[0], output))
            assert torch.equal(output, wanted[rank])
        assert all(map(torch.equal, inputs, before))
    persistent = dist.reduce_scatter_init(output := torch.zeros_like(inputs[rank]), inputs, op)
    persistent()
    assert torch.equal(output, wanted[rank])


def uneven_sizes_that_differ_between_ranks() -> None:
    rank = dist.get_rank()
    sizes = [[2, 1, 3], [2, 1, 3], [2, 2, 3]][rank]
    several = [torch.ones(size) for size in sizes]
    with pytest.raises(dist.CollectiveMismatchError, match="consists of a reduce to each rank.* rank 2 .* 2 elements"):
        dist.reduce_scatter(torch.empty(sizes[rank]), several)
    with pytest.raises(dist.CollectiveMismatchError, match="consists of a reduce to each rank.* rank 2 .* 2 elements"):
        dist.reduce_scatter(torch.empty(sizes[rank]), several, async_op=True).wait()
    with pytest.raises(dist.CollectiveMismatchError, match=r"is an all_to_all.* rank 1 .* 4 bytes to rank 2 .* 8"):
        dist.all_gather(several, torch.ones(sizes[rank]))
    even = [torch.ones(2) for _ in sizes] if rank == 2 else several
    for call in ("reduce", "all_to_all"):
        with pytest.raises(dist.CollectiveMismatchError, match=rf"called {call}\(.*rank 2 .* called (all_g|reduce_s)"):
            if call == "reduce":
                dist.reduce_scatter(torch.empty(even[rank].shape), even)
            else:
                dist.all_gather(even, torch.ones(even[rank].shape))
    dist.barrier()


UNEVEN = OneWorld(a_gather_of_uneven_tensors, a_reduce_scatter_of_uneven_parts, uneven_sizes_that_differ_between_ranks)


@pytest.mark.parametrize("claim", UNEVEN.programs)
def test_tensors_of_different_sizes(claim):
    UNEVEN.require(3, claim)


def a_tensor_that_is_not_contiguous() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    strided = torch.full((6, 4), rank + 1.0).t()[::2]
    assert not strided.is_contiguous()
    dist.all_reduce(strided)
    assert (strided == sum(range(1, size + 1))).all()
    for async_op in (False, True):  # the source's tensor is only read, so its elements may share memory
        copied = torch.tensor(5.0).expand(3) if rank == 0 else torch.zeros(3)
        work = dist.broadcast(copied, 0, async_op=async_op)
        if work is not None:
            work.wait()
        assert copied.tolist() == [5.0] * 3


def a_tensor_without_dimensions() -> None:
    scalar = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(1, dist.get_world_size() + 1))


def a_list_of_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    several = [torch.full((3,), 1.0 * rank), torch.full((70_000,), 2.0 * rank), torch.empty(0), torch.full((2, 2), 3.0)]
    work = dist.all_reduce(several, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    total = sum(range(size))
    assert (several[0] == total).all() and (several[1] == 2 * total).all() and (several[3] == 3 * size).all()


def a_factor_of_each_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    scaled = torch.ones(5)
    dist.all_reduce(scaled, dist.PremulSum(rank + 1.0))
    assert (scaled == sum(range(1, size + 1))).all()


def a_conjugate_tensor() -> None:
    conjugate = torch.full((3,), 1 + 2j).conj()
    dist.all_reduce(conjugate)
    assert (conjugate == dist.get_world_size() * (1 - 2j)).all()


def a_call_after_asynchronous_ones() -> None:
    size = dist.get_world_size()
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 100_000, 3)]
    sync = torch.ones(1)
    dist.all_reduce(sync)  # this call runs after the asynchronous ones
    assert sync.item() == size and all(work.is_completed() for work in works)
    assert (works[1].result()[0] == size).all()


ALL_REDUCE = OneWorld(
    a_tensor_that_is_not_contiguous,
    a_tensor_without_dimensions,
    a_list_of_tensors,
    a_factor_of_each_rank,
    a_conjugate_tensor,
    a_call_after_asynchronous_ones,
)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", ALL_REDUCE.programs)
def test_all_reduce_sums(size, case):
    ALL_REDUCE.require(size, case)


def reduce_shared_tensors() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [make(torch.float32, 300_001, r) for r in range(size)]
    wanted = expected(ReduceOp.SUM, values)
    tensor = dist.empty_shared(300_001)
    for _ in range(2):
        tensor.copy_(values[rank])
        dist.all_reduce(tensor)
        assert torch.equal(tensor, wanted)
    # If only some ranks' tensors are shared, the general path is used, with the same result.
    mixed = dist.empty_shared(300_001) if rank == 0 else torch.empty(300_001)
    mixed.copy_(values[rank])
    dist.all_reduce(mixed)
    assert torch.equal(mixed, wanted)
    part = dist.empty_shared(2, 300_001)[1]
    part.copy_(values[rank])
    dist.all_reduce(part)
    assert torch.equal(part, wanted)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shared_tensors_are_reduced_in_place(ranks, size):
    ranks(size)(reduce_shared_tensors)


def ranks_have_numbers_in_a_group() -> None:
    pair = dist.new_group([3, 1])
    rank = dist.get_rank()
    if rank in (1, 3):
        assert dist.get_rank(pair) == (0 if rank == 3 else 1) and dist.get_process_group_ranks(pair) == [3, 1]
        assert dist.get_global_rank(pair, 0) == 3 and dist.get_group_rank(pair, 1) == 1


def src_is_a_global_rank_and_group_src_is_not() -> None:
    pair = dist.new_group([3, 1])
    rank = dist.get_rank()
    if rank in (1, 3):
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=1, group=pair)
        assert tensor.item() == 1
        dist.broadcast(tensor.fill_(rank), group_src=0, group=pair)
        assert tensor.item() == 3


def a_rank_outside_a_group_takes_no_part() -> None:
    pair = dist.new_group([3, 1])
    if dist.get_rank() not in (1, 3):
        assert pair is dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(pair) == -1
        assert dist.all_reduce(torch.ones(1), group=pair) is None


def ranks_use_two_groups_in_different_orders() -> None:
    everyone = dist.new_group()
    order = (everyone, dist.group.WORLD) if dist.get_rank() % 2 else (dist.group.WORLD, everyone)
    works = [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    dist.all_reduce(tensor := torch.ones(1), group=everyone)
    assert tensor.item() == 4


def a_destroyed_group_is_refused() -> None:
    everyone = dist.new_group()
    dist.barrier(everyone)
    dist.destroy_process_group(everyone)
    with pytest.raises(ValueError, match="was destroyed"):
        dist.all_reduce(torch.ones(1), group=everyone)
    dist.barrier()


GROUPS = OneWorld(
    ranks_have_numbers_in_a_group,
    src_is_a_global_rank_and_group_src_is_not,
    a_rank_outside_a_group_takes_no_part,
    ranks_use_two_groups_in_different_orders,
    a_destroyed_group_is_refused,
)


@pytest.mark.parametrize("claim", GROUPS.programs)
def test_in_groups(claim):
    GROUPS.require(4, claim)


def sum_on_many_ranks() -> int:
    dist.init_process_group()
    tensor = torch.full((30_000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    small = torch.ones(1)
    dist.all_reduce(small)
    assert small.item() == dist.get_world_size()
    return int(tensor[0])


def test_sixteen_ranks_sum_on_few_cores(ranks):
    assert ranks(16)(sum_on_many_ranks, timeout_s=100) == [120] * 16


def sum_more_than_two_to_the_31_elements() -> None:
    dist.init_process_group()
    tensor = torch.full((2**31 + 5,), dist.get_rank() + 1, dtype=torch.int8)
    dist.all_reduce(tensor)
    assert tensor[0] == 3
    assert tensor[-1] == 3
    assert bool((tensor[-(1 << 20) :] == 3).all())


@pytest.mark.soak
def test_more_than_two_to_the_31_elements_are_summed(ranks):
    ranks(2)(sum_more_than_two_to_the_31_elements, timeout_s=110)
