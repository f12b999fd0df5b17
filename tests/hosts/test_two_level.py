"""Results of calls that use Paceline within hosts and another engine between hosts, compared with computed values."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from values import expected, make

import paceline as dist
from paceline import ReduceOp
from paceline.comm.engine.two_level import TwoLevelChannel


def all_that_passes_the_leaders() -> None:
    dist.init_process_group(
        "cpu:paceline", between_hosts="gloo", algorithm="hierarchical", timeout=timedelta(seconds=40)
    )
    world = dist.group.WORLD
    backwards = dist.new_group(list(reversed(range(world.size()))))
    for group in (world, backwards):
        assert isinstance(group._channel, TwoLevelChannel)
        rank, size = group.rank(), group.size()
        for dtype, op in (
            (torch.float32, ReduceOp.AVG),
            (torch.bfloat16, ReduceOp.SUM),
            (torch.int16, ReduceOp.MAX),
            (torch.bool, ReduceOp.BXOR),
        ):
            for count in (0, 5, 70_001):
                values = [make(dtype, count, r) for r in range(size)]
                wanted = expected(op, values)
                tensor = values[rank].clone()
                dist.all_reduce(tensor, op, group)
                torch.testing.assert_close(tensor, wanted, rtol=0.05, atol=0.2)
                for root in range(size):
                    tensor = values[rank].clone()
                    dist.reduce(tensor, op=op, group=group, group_dst=root)
                    torch.testing.assert_close(tensor, wanted if rank == root else values[rank], rtol=0.05, atol=0.2)
                    tensor = values[rank].clone()
                    dist.broadcast(tensor, group=group, group_src=root)
                    assert torch.equal(tensor, values[root])
        work = dist.all_reduce([torch.ones(3), torch.ones(2)], group=group, async_op=True)
        assert all(each.eq(size).all() for each in work.result())
        gathered = [torch.empty(2) for _ in range(size)]
        dist.all_gather(gathered, torch.full((2,), float(rank)), group)
        assert [each[0].item() for each in gathered] == list(range(size))
        dist.barrier(group)
    local = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=local)
    if world.rank() == world.size() - 1:
        dist.recv(torch.empty(2), 0)
    elif world.rank() == 0:
        dist.send(torch.ones(2), world.size() - 1)
    dist.barrier()
    if world.rank() == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"all_reduce.*rank 1 .*did not reach the call"):
            dist.all_reduce(torch.ones(1), group=local, timeout=timedelta(seconds=0.5))
    dist.barrier()
    dist.destroy_process_group()


def test_hosts_are_joined_by_another_engine(hosts):
    hosts([2, 1])(all_that_passes_the_leaders, timeout_s=90)
