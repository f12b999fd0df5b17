"""Groups across several hosts that fail one after another: errors name the rank that was lost first."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch

import paceline as dist
from hosts.talking import await_word, rank, say

_MESSENGER, _VICTIM = 0, 3


def leave_because_of_another(end: str, directory: str) -> tuple[int, str] | None:
    """The victim dies, and rank 0 detects the death and leaves; the other ranks share a group only with rank 0."""
    dist.init_process_group(timeout=timedelta(seconds=60))
    pairs = [dist.new_group([_MESSENGER, other]) for other in (1, 2)]
    dist.barrier()
    say(directory, f"{rank()} is ready")
    if rank() == _VICTIM:
        await_word(directory, *(f"{each} is ready" for each in range(4)))  # all ranks have left the barrier
        if end == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        return None
    with pytest.raises(dist.PeerLostError) as caught:
        if rank() == _MESSENGER:
            dist.barrier()
        elif rank() == 1:
            dist.all_reduce(torch.ones(1000), group=pairs[0])
        else:
            dist.recv(torch.ones(1000), src=_MESSENGER, group=pairs[1])
    dist.destroy_process_group()
    return caught.value.rank, str(caught.value)


@pytest.mark.parametrize("end", ["dies", "leaves"])
def test_a_rank_that_left_because_of_another_names_that(hosts, end, tmp_path):
    with hosts([1, 1, 2]).start(leave_because_of_another, end, str(tmp_path)) as world:
        told = world.join(50, expect_dead={_VICTIM} if end == "dies" else set())
        first = f"rank {_VICTIM} (h2, pid {world.pids[_VICTIM]}) {'died' if end == 'dies' else 'left the group'}"
        messenger = f"rank {_MESSENGER} (h0, pid {world.pids[_MESSENGER]})"
    for number in range(3):
        named, message = told[number]
        assert named == _VICTIM
        assert first in message
        if number != _MESSENGER:
            assert f"and {messenger} left the group after that, detected by rank {number} (" in message
