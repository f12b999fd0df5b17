"""Collectives on lists of tensors of several types, on real processes and compared with torch's gloo."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as torch_dist

import paceline as dist

TYPES = [torch.float32, torch.int64, torch.float64, torch.uint8]


def some_tensors(rank: int, seed: int, types: list[torch.dtype]) -> list[torch.Tensor]:
    """Returns tensors with the same types and shapes, but different values, on every rank."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(100 * rank + seed)
    shapes = [(choose.randrange(1, 40), choose.randrange(1, 300)) for _ in range(choose.randrange(1, 9))]
    return [torch.randint(0, 9, shape, generator=generator).to(choose.choice(types)) for shape in shapes]


def same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ours) == len(others) and all(map(torch.equal, ours, others))


def as_torch_does(rendezvous: str, async_op: bool) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)

    def call(function, *args):
        work = function(*args, async_op=async_op)
        assert (work is not None) == async_op
        if work is not None:
            work.wait()

    for seed in range(6):
        one_type = [TYPES[seed % len(TYPES)]]
        ours, theirs = some_tensors(rank, seed, one_type), some_tensors(rank, seed, one_type)
        call(dist.all_reduce_coalesced, ours)
        torch_dist.all_reduce_coalesced(theirs)
        assert same(ours, theirs)

        inputs = some_tensors(rank, seed, one_type)
        ours, theirs = ([[torch.empty_like(t) for t in inputs] for _ in range(size)] for _ in range(2))
        call(dist.all_gather_coalesced, ours, inputs)
        torch_dist.all_gather_coalesced(theirs, inputs)
        assert all(map(same, ours, theirs))

        # torch's gloo has no coalesced form of the other collectives, and no form accepts several types, so each tensor
        # needs its own call.
        mixed = some_tensors(rank, seed, TYPES)
        ours, theirs = [t.clone() for t in mixed], [t.clone() for t in mixed]
        call(dist.all_reduce_coalesced, ours, dist.ReduceOp.MAX)
        for tensor in theirs:
            torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX)
        assert same(ours, theirs)

        ours, theirs = [t.clone() for t in mixed], [t.clone() for t in mixed]
        call(dist.broadcast_coalesced, ours, size - 1, None, [1, 2000, 1 << 20][seed % 3])
        for tensor in theirs:
            torch_dist.broadcast(tensor, size - 1)
        assert same(ours, theirs)

        ours, theirs = ([t.new_empty(size * t.numel()) for t in mixed] for _ in range(2))
        call(dist.all_gather_into_tensor_coalesced, ours, mixed)
        for whole, tensor in zip(theirs, mixed, strict=True):
            torch_dist.all_gather_into_tensor(whole, tensor.view(-1))
        assert same(ours, theirs)

        wholes = [torch.cat([t * (r + 1) for r in range(size)]) for t in mixed]
        ours, theirs, third = ([torch.empty_like(t) for t in mixed] for _ in range(3))
        call(dist.reduce_scatter_tensor_coalesced, ours, wholes)
        call(dist.reduce_scatter_coalesced, third, [list(whole.chunk(size)) for whole in wholes])
        for output, whole in zip(theirs, wholes, strict=True):
            torch_dist.reduce_scatter(output, list(whole.chunk(size)))
        assert same(ours, theirs)
        assert same(third, theirs)
    torch_dist.barrier()
    torch_dist.destroy_process_group()


@pytest.mark.parametrize(("size", "async_op"), [(1, False), (2, True), (3, False), (3, True)])
def test_lists_are_treated_as_torch_treats_their_tensors(ranks, size, async_op, tmp_path):
    ranks(size)(as_torch_does, str(tmp_path / "rendezvous"), async_op)


def one_work() -> None:
    dist.init_process_group()
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(2, 2)[:, 0]]
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    values = work.get_future().wait()
    assert [id(each) for each in values] == [id(each) for each in tensors]
    assert all((each == 2).all() for each in values)
    assert work.is_success()
    work = dist.all_reduce_coalesced([torch.ones(3), torch.ones(1 + dist.get_rank()).double()], async_op=True)
    with pytest.raises(dist.CollectiveMismatchError, match="float64, 1 elements.*float64, 2 elements"):
        work.wait()
    assert isinstance(work.exception(), dist.CollectiveMismatchError)
    assert not work.is_success()
    dist.all_reduce_coalesced([])
    with pytest.raises(ValueError, match="output_tensor_lists is 1 entries; it must be a list of 2, one list for each"):
        dist.all_gather_coalesced([[torch.ones(1)]], [torch.ones(1)])
    with pytest.raises(
        ValueError, match=r"output_tensors\[1\] has 3 elements; with 2 ranks of 1 elements it must have 2"
    ):
        dist.all_gather_into_tensor_coalesced([torch.ones(2), torch.ones(3)], [torch.ones(1), torch.ones(1)])
    with pytest.raises(ValueError, match="buffer_size is 0"):
        dist.broadcast_coalesced([torch.ones(1)], 0, buffer_size=0)
    dist.barrier()


def test_all_types_together_are_one_work(ranks):
    ranks(2)(one_work)
