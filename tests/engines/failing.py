"""Calls that fail with any engine. After a call has failed, its group cannot be used."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

import paceline as dist
from paceline.comm.engine.channel import OutcomeCode

_TIMEOUT = timedelta(seconds=0.7)


def a_rank_stays_away(group: dist.ProcessGroup) -> None:
    absent = group.size() - 1
    if group.rank() != absent:
        started = time.monotonic()
        with pytest.raises(
            dist.CollectiveTimeoutError, match=rf"all_reduce.*rank {absent} .*did not reach the call"
        ) as caught:
            dist.all_reduce(torch.ones(3), group=group, timeout=_TIMEOUT)
        assert time.monotonic() - started < 20
        assert caught.value.missing == (absent,)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(dist.CollectiveTimeoutError):
            work.wait(timedelta(seconds=20))
        assert work.exception() is not None
    dist.barrier()


def nobody_sends(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"recv.*rank 1 .*did not reach the call"):
            dist.recv(torch.ones(3), group=group, group_src=1, timeout=_TIMEOUT)
    dist.barrier()


def different_calls(group: dist.ProcessGroup) -> None:
    tensor = torch.ones(3)
    with pytest.raises(dist.CollectiveMismatchError, match="do not match") as caught:
        if group.rank() == 0:
            dist.all_reduce(tensor, group=group, timeout=_TIMEOUT)
        else:
            dist.broadcast(tensor, group=group, group_src=group.size() - 1, timeout=_TIMEOUT)
            dist.all_reduce(tensor, group=group, timeout=_TIMEOUT)
    assert "all_reduce(float32" in str(caught.value) and "broadcast(float32" in str(caught.value)
    dist.barrier()


def the_ranks_abort(group: dist.ProcessGroup) -> None:
    assert group.failure() is OutcomeCode.OK
    dist.barrier(group=group)
    group.abort()
    assert group.failure() is OutcomeCode.ABORTED
    with pytest.raises(dist.GroupAbortedError, match=r"all_reduce.* aborted the group"):
        dist.all_reduce(torch.ones(3), group=group)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    with pytest.raises(dist.GroupAbortedError):
        work.wait()
    dist.barrier()


def groups_wait_for_each_other(group: dist.ProcessGroup) -> None:
    other = dist.new_group(backend=dist.get_backend(group))
    with pytest.raises(dist.CollectiveTimeoutError, match="in another call.*The ranks wait for each other"):
        dist.all_reduce(torch.ones(3), group=other if group.rank() == 1 else group, timeout=_TIMEOUT)
    dist.barrier()


PROGRAMS = [a_rank_stays_away, nobody_sends, groups_wait_for_each_other, the_ranks_abort]
# Only for engines that compare the ranks' calls.
COMPARING = [different_calls]
