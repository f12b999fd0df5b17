"""An abort on one host terminates the pending calls of the ranks on all hosts."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

import paceline as dist
from hosts.talking import rank


def abort_while_all_wait(how: str) -> str:
    dist.init_process_group(timeout=timedelta(seconds=100))
    if rank() == 3:
        dist.barrier()
        threading.Timer(0.3, dist.GroupMember.WORLD.abort).start()
    started = time.monotonic()
    with pytest.raises(dist.GroupAbortedError) as caught:
        if rank() != 3:
            dist.barrier()  # a rank that is slow to leave the barrier may raise the error here
        if how == "message":
            dist.recv(torch.empty(1), (rank() + 1) % 4)
        elif rank() != 0:  # the message is from the missing ranks
            dist.all_reduce(torch.ones(100_000))
        else:
            dist.recv(torch.empty(1), 1)
    assert time.monotonic() - started < 25
    assert caught.value.rank == 3
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("how", ["call", "message"])
def test_an_abort_reaches_every_host(hosts, how):
    with hosts(2, 2).start(abort_while_all_wait, how) as world:
        told = world.join(60)
        pids = world.pids
    for each in (0, 1, 2):
        assert f"because rank 3 (h1, pid {pids[3]}) aborted the group" in told[each]
    assert "because this process aborted the group" in told[3]
