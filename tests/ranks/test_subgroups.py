"""Several groups created at once, and subgroups of groups, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from hosts.talking import await_word, say

import paceline as dist


def summed(group: object) -> float:
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def as_torch_does(rendezvous: str) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)

    def compare(function: str, *args: object) -> None:
        mine, groups = getattr(dist, function)(*args)
        torch_mine, torch_groups = getattr(torch_dist, function)(*args)
        assert len(groups) == len(torch_groups)
        outside = dist.GroupMember.NON_GROUP_MEMBER
        assert [each is outside for each in groups] == [
            each == torch_dist.GroupMember.NON_GROUP_MEMBER for each in torch_groups
        ]
        if torch_mine is None:
            assert mine is outside
            return
        assert mine in groups
        assert dist.get_process_group_ranks(mine) == torch_dist.get_process_group_ranks(torch_mine)
        assert dist.get_rank(mine) == torch_dist.get_rank(torch_mine)
        tensor = torch.tensor([10.0**rank])
        torch_dist.all_reduce(tensor, group=torch_mine)
        assert summed(mine) == tensor.item()

    compare("new_subgroups", 2)
    compare("new_subgroups", 1)
    compare("new_subgroups_by_enumeration", [[0, 2], [1, 3]])
    compare("new_subgroups_by_enumeration", [[1, 2]])
    torch_dist.destroy_process_group()


def test_subgroups_are_those_that_torch_makes(ranks, tmp_path):
    ranks(4)(as_torch_does, str(tmp_path / "rendezvous"))


def groups_of_groups() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    assert dist.group.WORLD is dist.GroupMember.WORLD
    assert summed(dist.group.WORLD) == 1111
    outside = dist.GroupMember.NON_GROUP_MEMBER
    everyone, (only,) = dist.new_subgroups()  # LOCAL_WORLD_SIZE is 4
    assert everyone is only
    assert everyone.size() == 4

    reverse = dist.new_group([3, 2, 1, 0])
    half = dist.split_group(reverse, [[0, 1], [3]], group_desc="half")
    assert dist.get_process_group_ranks(half) == {0: [0], 1: [], 2: [3, 2], 3: [3, 2]}[rank]
    assert summed(half) == {0: 1, 1: 10, 2: 1100, 3: 1100}[rank]
    assert (half is outside) == (rank == 1)
    assert rank != 2 or "half" in repr(half)

    # Only the members of the parent group make the call. Groups of all ranks can be created before and after it.
    if rank in (2, 3):
        one = dist.split_group(half, [[1], [0]], timeout=timedelta(seconds=7))
        assert dist.get_process_group_ranks(one) == [rank]
        assert one.timeout == timedelta(seconds=7)
        again, listed = dist.new_subgroups(group=half)
        assert again.size() == 2
        assert listed == [again]
    later = dist.new_group([1, 2])
    assert summed(later) == {0: 1, 1: 110, 2: 110, 3: 1000}[rank]
    assert dist.split_group(outside, [[0]]) is outside
    assert dist.new_subgroups(1, outside) == (outside, [])

    if half is not outside:
        dist.destroy_process_group(half)
    assert summed(None) == 1111


def test_a_group_of_a_group_is_made_by_its_parents_ranks(ranks):
    ranks(4)(groups_of_groups)


def divide_wrongly() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="cannot be divided into groups of group_size=2"):
        dist.new_subgroups(2)
    with pytest.raises(ValueError, match="no lists of ranks"):
        dist.split_group()
    with pytest.raises(ValueError, match="a list of ranks is empty"):
        dist.split_group(split_ranks=[[]])
    with pytest.raises(ValueError, match=r"rank 3 of \[0, 3\] does not exist; the group has ranks 0 to 2"):
        dist.new_subgroups_by_enumeration([[0, 3]])
    with pytest.raises(ValueError, match=r"rank 1 is in \[0, 1\] and in \[1, 2\]"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="backend 'telepathy' is not known"):
        dist.split_group(None, [[0]], backend="telepathy")
    with pytest.raises(ValueError, match="pg_options is for engines"):
        dist.split_group(None, [[0]], pg_options=1)
    with pytest.raises(
        dist.CollectiveMismatchError, match=r"ranks \[2\] requested different groups from rank 0; this rank requested"
    ):
        dist.split_group(None, [[0, 1], [2]] if rank == 2 else [[0], [1, 2]])
    assert summed(None) == 111


def test_divisions_that_do_not_work_are_refused_on_every_rank(ranks):
    ranks(3)(divide_wrongly)


def wait_for_two(directory: str) -> str:
    dist.init_process_group()
    dist.monitored_barrier()
    rank = dist.get_rank()
    if rank in (1, 3):
        await_word(directory, "0", "2")
        with pytest.raises(dist.CollectiveTimeoutError, match="which was waiting for this rank") as late:
            dist.barrier()  # may succeed, because the others had arrived before they timed out
            dist.barrier()
        assert late.value.missing == (4 - rank,)  # not this rank itself
        return ""
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=rank == 0)
    assert caught.value.missing == (1, 3)
    say(directory, str(rank))
    return str(caught.value)


def test_a_monitored_barrier_names_the_absent_on_every_rank(ranks, tmp_path):
    told = ranks(4)(wait_for_two, str(tmp_path))
    assert "monitored_barrier: ranks [1, 3] did not reach it within 1 s" in told[0]
    assert "monitored_barrier: rank 1 and 1 more" in told[2]


def make_groups_and_end_them_at_once() -> None:
    dist.init_process_group(timeout=timedelta(seconds=20))
    for _ in range(20):
        dist.destroy_process_group(dist.new_group())
    dist.barrier()


def test_a_group_may_end_as_soon_as_it_is_made(ranks):
    ranks(4)(make_groups_and_end_them_at_once)


def test_world_is_there_before_anything_else_was_used():
    code = "import paceline; assert paceline.group.WORLD is None; assert paceline.group.__name__ == 'paceline.group'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))
