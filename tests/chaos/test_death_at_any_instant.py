"""Kills or stops a rank at a random time. The other ranks must detect this, and none may hang."""

from __future__ import annotations

import random
import signal
import time
from datetime import timedelta

import pytest
import torch
from launching import wait_until

import paceline as dist


def reduce_for_ever(ready: str, timeout_s: float) -> tuple[str, int]:
    dist.init_process_group()
    dist.GroupMember.WORLD.set_timeout(timedelta(seconds=timeout_s))
    sizes = [1, 1000, 50_000, 500_000]
    tensors = [torch.ones(size) for size in sizes]
    shared = dist.empty_shared(300_000)
    with open(f"{ready}{dist.get_rank()}", "w"):
        pass
    step = 0
    try:
        while True:
            step += 1
            for tensor in (*tensors, shared):
                tensor.fill_(1.0)
                work = dist.all_reduce(tensor, async_op=step % 2 == 0)
                if work is not None:
                    work.wait()
                if not (tensor == dist.get_world_size()).all():
                    return "a wrong sum", -1
            dist.all_gather([torch.empty(10) for _ in range(dist.get_world_size())], torch.ones(10))
    except dist.PeerLostError as error:
        return "lost", error.rank
    except dist.CollectiveTimeoutError as error:
        return f"timed out {error}", -1


@pytest.mark.parametrize("seed", range(5))
def test_survivors_of_a_kill_at_any_instant_name_the_dead_rank(ranks, tmp_path, seed):
    chance = random.Random(seed)
    victim = chance.randrange(3)
    with ranks(3).start(reduce_for_ever, str(tmp_path / "ready"), 120) as world:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        time.sleep(chance.random() / 3)
        world.kill(victim)
        told = world.join(60, expect_dead=frozenset({victim}))  # long before the timeout
    for rank in range(3):
        if rank != victim:
            assert told[rank] == ("lost", victim)


def test_a_rank_stopped_at_any_instant_is_named_at_the_time_out(ranks, tmp_path):
    with ranks(3).start(reduce_for_ever, str(tmp_path / "ready"), 5) as world:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        time.sleep(0.1)
        world.kill(1, signal.SIGSTOP)
        told = world.join(60, expect_dead=frozenset({1}))
    for rank in (0, 2):
        assert told[rank][0].startswith("timed out rank")
        assert "rank 1 (" in told[rank][0]
