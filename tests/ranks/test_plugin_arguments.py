"""All forms of arguments that torch's group methods accept, compared with gloo, and sizes that do not match."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp
from torch_programs import agree, torch_group

LIMIT = timedelta(seconds=30)


def gather_coalesced() -> list[torch.Tensor]:
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    mine = [torch.full((2, 2), float(rank)), torch.full((3,), 10.0 * rank)]
    lists = [[torch.empty(2, 2), torch.empty(3)] for _ in range(size)]
    torch_dist.all_gather_coalesced(lists, mine)
    assert [each[1][0].item() for each in lists] == [10.0 * r for r in range(size)]
    return [tensor for each in lists for tensor in each]


def values_for_options() -> list[torch.Tensor]:
    group = torch_dist.group.WORLD
    rank, size = group.rank(), group.size()
    mine, last = torch.full((3,), rank + 1.0), size - 1
    results = []

    def take(work: torch_dist.Work, *tensors: torch.Tensor) -> None:
        work.wait()
        results.extend(tensor.clone() for tensor in tensors)

    for op in (ReduceOp.MAX, ReduceOp.PRODUCT):
        take(group.allreduce(t := mine.clone(), op), t)
        take(group.allreduce([t := mine.clone()], op, LIMIT), t)
        take(group.allreduce(t := mine.clone(), op=op, timeout=LIMIT), t)
        work = group.reduce(t := mine.clone(), last, op, LIMIT)
        take(work, *([t] if rank == last else []))
        parts = [mine * (r + 1) for r in range(size)]
        take(group.reduce_scatter(t := torch.empty(3), parts, op, LIMIT), t)
        take(group.reduce_scatter(t := torch.empty(3), parts, op=op), t)
    take(group.allreduce(t := mine.clone()), t)
    take(group.reduce(t := mine.clone(), root=0), *([t] if rank == 0 else []))
    take(group.broadcast(t := mine.clone(), last), t)
    take(group.broadcast(t := mine.clone(), root=last, timeout=LIMIT), t)
    take(group.allgather(outs := [torch.empty(3) for _ in range(size)], mine, LIMIT), *outs)
    take(group.allgather(outs := [torch.empty(3) for _ in range(size)], mine, timeout=LIMIT), *outs)
    outs = [torch.empty(3) for _ in range(size)] if rank == last else []
    take(group.gather(outs, mine, last), *outs)
    take(group.gather(outs, mine, root=last, timeout=LIMIT), *outs)
    take(group.scatter(t := torch.empty(3), [mine * r for r in range(size)] if rank == 0 else [], 0, LIMIT), t)
    for timeout in ({}, {"timeout": LIMIT}):
        take(group.alltoall_base(t := torch.empty(size), torch.arange(float(size)) + rank, [], [], **timeout), t)
    take(group.barrier())
    take(group.barrier(timeout=LIMIT))
    return results


def give_every_form_of_an_argument(directory: str) -> None:
    # Before release 2.7, the groups of torch's own backends accept only option objects.
    agree([gather_coalesced, *([values_for_options] if torch.__version__ >= (2, 7) else [])], directory)


def test_every_form_of_an_argument_agrees_with_gloo(ranks, tmp_path):
    ranks(3)(give_every_form_of_an_argument, str(tmp_path))


def give_sizes_that_do_not_fit(directory: str) -> None:
    with torch_group("paceline", directory):
        rank = torch_dist.get_rank()
        odd, mine = torch.zeros(7), torch.ones(3)
        with pytest.raises(ValueError, match=rf"rank {rank}: .*7 elements; with 2 ranks of 3 elements .* have 6"):
            torch_dist.all_gather_into_tensor(odd, mine)
        with pytest.raises(ValueError, match=rf"rank {rank}: .*7 elements; with 2 ranks of 3 elements .* have 6"):
            torch_dist.reduce_scatter_tensor(mine, odd)
        with pytest.raises(ValueError, match=rf"rank {rank}: .*7 elements; with 2 ranks of 3 elements .* have 6"):
            torch_dist.group.WORLD.all_gather_single_coalesced([odd], [mine])
        with pytest.raises(ValueError, match=rf"rank {rank}: .*7 rows, which cannot be divided evenly among 2 ranks"):
            torch_dist.all_to_all_single(odd, odd.clone())
        with pytest.raises(ValueError, match=rf"rank {rank}: .*_split_sizes is \[3, 3\].*the sum 7"):
            torch_dist.all_to_all_single(odd, odd.clone(), [3, 3], [3, 3])
        assert not odd.any()
        torch_dist.all_reduce(mine)
        assert mine.tolist() == [2, 2, 2]


def test_sizes_that_ranks_cannot_share_are_refused(ranks, tmp_path):
    ranks(2)(give_sizes_that_do_not_fit, str(tmp_path))


def name_ranks_that_cannot_be_meant(directory: str) -> None:
    with torch_group("paceline", directory):
        group, rank = torch_dist.group.WORLD, torch_dist.get_rank()
        mine, other = torch.full((2,), rank + 1.0), 1 - rank
        to_itself = rf"is rank {rank}, this one; a rank cannot send to itself"
        with pytest.raises(ValueError, match=f"dst {to_itself}"):
            torch_dist.isend(mine, rank)
        with pytest.raises(ValueError, match=f"src {to_itself}"):
            torch_dist.irecv(mine, rank)
        for op in (torch_dist.isend, torch_dist.irecv):
            with pytest.raises(ValueError, match=to_itself):
                torch_dist.batch_isend_irecv([torch_dist.P2POp(op, mine, rank)])
        for nobody in (-2, 2, 2**20):
            with pytest.raises(ValueError, match=rf"send: dst is group rank {nobody}; .* has ranks 0 to 1"):
                group.send([mine], nobody, 0)
            with pytest.raises(ValueError, match=rf"recv: src is group rank {nobody}; .* has ranks 0 to 1"):
                group.recv([mine], nobody, 0)
            for call, arguments in (
                (group.broadcast, [mine]),
                (group.reduce, [mine]),
                (group.gather, [[], mine]),
                (group.scatter, [mine, []]),
            ):
                with pytest.raises(ValueError, match=rf"the root is group rank {nobody}; .* has ranks 0 to 1"):
                    call(*arguments, root=nobody)
        for tag in (-1, 2**31, 2**70):
            with pytest.raises(ValueError, match=rf"tag is {tag}; it must be from 0 to {2**31 - 1}"):
                group.send([mine], other, tag)
        assert mine.tolist() == [rank + 1.0] * 2
        got = torch.empty(2)
        exchange = [torch_dist.P2POp(torch_dist.isend, mine, other), torch_dist.P2POp(torch_dist.irecv, got, other)]
        for work in torch_dist.batch_isend_irecv(exchange):
            work.wait()
        assert got.tolist() == [other + 1.0] * 2


def test_ranks_that_cannot_be_meant_are_refused_and_harm_nothing(ranks, tmp_path):
    ranks(2)(name_ranks_that_cannot_be_meant, str(tmp_path))
