"""Groups that fail one after another: errors name the rank that was lost first, in any group."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch

import paceline as dist
from paceline.comm.engine.channel import CallFailure, OutcomeCode
from paceline.comm.engine.failures import RankIdentity, to_error

_MESSENGER, _VICTIM = 0, 4

Told = tuple[int, str]


def _lose(end: str, way: str) -> Told | None:
    """The victim dies, and rank 0 detects the death and exits; the other ranks share a group only with rank 0."""
    dist.init_process_group(timeout=timedelta(seconds=80))
    rank = dist.get_rank()
    pairs = [dist.new_group([_MESSENGER, other]) for other in (1, 2, 3)]
    dist.barrier()
    if rank == _VICTIM:
        if end == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        return None
    with pytest.raises(dist.PeerLostError) as caught:
        if rank == _MESSENGER:
            dist.barrier()
        elif rank == 1:
            dist.all_reduce(torch.ones(1000), group=pairs[0])
        elif rank == 2:
            dist.all_reduce(torch.ones(1000), group=pairs[1], async_op=True).wait()
        else:
            dist.recv(torch.ones(1000), src=_MESSENGER, group=pairs[2])
    if rank == _MESSENGER and way == "exit":
        os._exit(0)
    dist.destroy_process_group()
    return caught.value.rank, str(caught.value)


def test_a_rank_that_left_after_a_death_names_the_dead(ranks):
    with ranks(5).start(_lose, "dies", "destroy") as world:
        told = world.join(60, expect_dead={_VICTIM})
        dead, messenger = (f"rank {rank} ({os.uname().nodename}, pid {world.pids[rank]})" for rank in (_VICTIM, 0))
    for rank in range(4):
        named, message = told[rank]
        assert named == _VICTIM
        assert f"{dead} died" in message
    for rank in (1, 2, 3):
        assert f"{dead} died, and {messenger} left the group after that, detected by rank {rank} (" in told[rank][1]


def test_a_rank_that_left_after_another_left_names_that(ranks):
    with ranks(5).start(_lose, "leaves", "destroy") as world:
        told = world.join(60)
    for rank in range(4):
        named, message = told[rank]
        assert named == _VICTIM
        assert f"rank {_VICTIM} (" in message and "left the group (its script ended" in message


def test_a_rank_that_ended_after_a_death_is_named_with_the_dead(ranks):
    with ranks(5).start(_lose, "dies", "exit") as world:
        told = world.join(60, expect_dead={_MESSENGER, _VICTIM})
        dead, messenger = (f"rank {rank} ({os.uname().nodename}, pid {world.pids[rank]})" for rank in (_VICTIM, 0))
    for rank in (1, 2, 3):
        named, message = told[rank]
        assert named == _MESSENGER
        assert f"{messenger} died, after {dead} had died, detected by rank {rank} (" in message


MEMBERS = [RankIdentity(rank, "h", 100 + rank) for rank in range(3)]


@pytest.mark.parametrize(
    ("outcome", "rank", "said"),
    [
        (CallFailure(OutcomeCode.PEER_LOST, gone=[1]), 1, "rank 1 (h, pid 101) died, detected by rank 0"),
        (
            CallFailure(OutcomeCode.PEER_LOST, gone=[1], left=[1]),
            1,
            "rank 1 (h, pid 101) left the group (its script ended",
        ),
        (
            CallFailure(OutcomeCode.PEER_LOST, gone=[1], left=[1], cause=2),
            2,
            "rank 2 (h, pid 102) died, and rank 1 (h, pid 101) left the group after that, detected by rank 0",
        ),
        (
            CallFailure(OutcomeCode.PEER_LOST, gone=[1], left=[1], cause=7),  # rank 7 is in none of these groups
            1,
            "rank 1 (h, pid 101) left the group (its script ended",
        ),
    ],
)
def test_the_error_names_who_went_first(outcome: CallFailure, rank: int, said: str) -> None:
    error = to_error(outcome, MEMBERS[:2], 0, "barrier()", engine_members=MEMBERS)
    assert isinstance(error, dist.PeerLostError)
    assert error.rank == rank and (error.host, error.pid) == ("h", 100 + rank)
    assert str(error).startswith(said)
