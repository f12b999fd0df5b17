"""More ranks on one host than a mask has bits, with too few descriptors for a connection to each rank."""

from __future__ import annotations

import os
import resource
import signal
from datetime import timedelta

import pytest
import torch
from launching import wait_until

import paceline as dist

_DESCRIPTORS = 22  # per rank, besides those that are open at the start; rank 0's store needs one more for each rank
_LENGTHS = (1, 30_000)  # one is sent in a cell, the other in slices


def _reductions(rank: int, size: int) -> None:
    total = size * (size - 1) // 2
    for length in _LENGTHS:
        tensor = torch.full((length,), float(rank))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((length,), float(total)))
    shared = dist.empty_shared(40_000).fill_(rank)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    assert torch.equal(shared, torch.full((40_000,), float(size - 1)))
    tensor = torch.tensor([rank])
    dist.reduce(tensor, size - 1)
    assert tensor.item() == (total if rank == size - 1 else rank)
    mine = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_tensor(mine, torch.arange(2 * size) + rank)
    assert mine.tolist() == [(2 * rank + i) * size + total for i in (0, 1)]


def _moves(rank: int, size: int) -> None:
    last = size - 1
    tensor = torch.tensor([rank, -rank])
    dist.broadcast(tensor, last)
    assert tensor.tolist() == [last, -last]
    everyone = torch.empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(everyone, torch.tensor([rank]))
    assert everyone.tolist() == list(range(size))
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(size)] if rank == last else None
    dist.gather(torch.tensor([rank]), gathered, last)
    assert gathered is None or [each.item() for each in gathered] == list(range(size))
    part = torch.empty(1, dtype=torch.int64)
    dist.scatter(part, [torch.tensor([7 * r]) for r in range(size)] if rank == 0 else None, 0)
    assert part.item() == 7 * rank
    received = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(received, torch.arange(size) + 1000 * rank)
    assert received.tolist() == [1000 * r + rank for r in range(size)]


def _messages(rank: int, size: int) -> None:
    received = torch.empty(1, dtype=torch.int64)
    sending = dist.isend(torch.tensor([rank]), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()
    assert received.item() == (rank - 1) % size


def _most_stay_away(rank: int, size: int, directory: str) -> None:
    """All ranks except rank 0 skip a call in a separate group."""
    group = dist.new_group(list(range(size)))
    given_up = os.path.join(directory, "given up")
    if rank:
        wait_until(lambda: os.path.exists(given_up), 90)
        return
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        dist.all_reduce(torch.ones(3), group=group, timeout=timedelta(seconds=0.2))
    with open(given_up, "w"):
        pass
    message = str(caught.value)
    assert "rank 1 (" in message and f"and {size - 5} more did not reach the call" in message
    assert len(message) < 1200


def _everything(directory: str, victim: int) -> str:
    """Runs calls of every kind, then kills the victim; returns the error that the other ranks raise."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    inherited = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (inherited + _DESCRIPTORS + int(os.environ["WORLD_SIZE"]), most))
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    _reductions(rank, size)
    _moves(rank, size)
    _messages(rank, size)
    few = [1, size // 2, size - 1]
    group = dist.new_group(few)
    if rank in few:
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(few)
    dist.barrier()
    _most_stay_away(rank, size, directory)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError) as caught:
        dist.all_reduce(torch.ones(3), timeout=timedelta(seconds=90))
    assert caught.value.rank == victim
    return str(caught.value)


def _do_everything(ranks, size: int, directory: str, timeout_s: float) -> None:
    victim = size - 3
    with ranks(size).start(_everything, directory, victim) as world:
        told = world.join(timeout_s, expect_dead={victim})
    survivors = [each for rank, each in enumerate(told) if rank != victim]
    assert all(f"rank {victim} (" in message and len(message) < 600 for message in survivors)


def test_66_ranks_do_every_collective_and_learn_of_a_death(ranks, tmp_path):
    _do_everything(ranks, 66, str(tmp_path), 100)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_256_ranks_do_every_collective_and_learn_of_a_death(ranks, tmp_path):
    _do_everything(ranks, 256, str(tmp_path), 500)
