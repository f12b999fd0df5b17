"""Errors that ranks on several hosts raise when one of them dies, vanishes or leaves."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch

import paceline as dist
from hosts.talking import await_word, rank, say
from hosts.telling import CALLS, SOON_S, told_by, told_to, world


def wait_for_the_dead(call: str) -> tuple[str, str, float]:
    dist.init_process_group()
    if rank() == 1:
        dist.barrier()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    told = told_by(lambda: [dist.barrier(), CALLS[call](world())])  # a busy rank may still be in the barrier
    assert told_by(dist.barrier)[0] == "PeerLostError"
    return told


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce, async", "recv, async", "send"])
def test_a_killed_rank_is_named_to_every_waiter_at_once(hosts, call):
    with hosts([1, 2]).start(wait_for_the_dead, call) as run:
        told = run.join(60, expect_dead={1})
    for number in (0, 2):
        error, message, took_s = told[number]
        assert error == "PeerLostError" and took_s < SOON_S, (took_s, message)
        assert message.startswith(f"rank 1 (h1, pid {run.pids[1]}) died, detected by rank ")
        assert told_to(number, message), message
        assert "Look at its output" in message


def reduce_on(ready: str, timeout_s: float) -> tuple[str, str, float]:
    dist.init_process_group()
    dist.barrier()
    world().set_timeout(timedelta(seconds=timeout_s))
    say(ready, str(rank()))

    def call() -> None:
        while True:
            dist.all_reduce(torch.ones(100_000))

    return told_by(call)


def only_wait(ready: str, timeout_s: float) -> tuple[str, str, float]:
    dist.init_process_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier()
    say(ready, str(rank()))
    return told_by(lambda: world().recv(torch.empty(3), 2 if rank() != 2 else 0, async_op=False))


@pytest.mark.parametrize("fn", [reduce_on, only_wait])
def test_a_host_that_vanishes_is_noticed(hosts, fn, tmp_path):
    with hosts(3, 1, bridged=True).start(fn, str(tmp_path), 110) as run:
        await_word(str(tmp_path), "0", "1", "2")
        time.sleep(0.3)
        run.cut_host(2)
        told = run.join(80)  # shorter than the timeout
    for number, (error, message, _) in enumerate(told):
        assert error == "PeerLostError", message
        lost = "rank 2 (h2, pid " if number != 2 else "rank "
        assert message.startswith(lost) and "detected by" in message, message


def test_a_time_out_due_before_the_silence_limit_comes_first(hosts, tmp_path):
    with hosts(2, 1, bridged=True).start(reduce_on, str(tmp_path), 3) as run:
        await_word(str(tmp_path), "0", "1")
        time.sleep(0.3)
        run.cut_host(1)
        for number, (error, message, _) in enumerate(run.join(60)):
            assert error == "CollectiveTimeoutError"
            # The link was cut between two calls, or during a call that the other rank had reached.
            other = re.escape(f"rank {1 - number} (h{1 - number}, pid {run.pids[1 - number]})")
            assert re.search(f"{other} (did not reach the call|reached the call but did not complete it)", message), (
                message
            )


def reduce_until(ready: str) -> int:
    dist.init_process_group(timeout=timedelta(seconds=60))
    dist.barrier()
    say(ready, str(rank()))
    wrong = 0
    over = torch.zeros(1)
    while not over:
        tensor = torch.ones(50_000)
        dist.all_reduce(tensor)
        wrong += int(not (tensor == 2).all())
        over.fill_(float(os.path.exists(f"{ready}/healed") and rank() == 0))
        dist.broadcast(over, 0)
    return wrong


def test_a_short_cut_is_survived(hosts, tmp_path):
    with hosts(2, 1, bridged=True).start(reduce_until, str(tmp_path)) as run:
        await_word(str(tmp_path), "0", "1")
        run.cut_host(1)
        time.sleep(1.5)
        run.heal()
        say(str(tmp_path), "healed")
        assert run.join(60) == [0, 0]


def leave_early() -> list[tuple[str, tuple[str, str, float]]]:
    dist.init_process_group(timeout=timedelta(seconds=60))
    told = []
    for name, call in CALLS.items():
        group = dist.new_group()
        dist.barrier(group)
        if rank() == 1:
            time.sleep(0.1)
            dist.destroy_process_group(group)  # this rank leaves the group, but does not exit
        else:
            told.append((name, told_by(lambda call=call, group=group: call(group))))
        dist.barrier()
    return told


@pytest.mark.parametrize("layout", [(3, 1), ([2, 1],)], ids=str)
def test_a_rank_that_left_is_told_from_one_that_died(hosts, layout):
    for number, told in enumerate(hosts(*layout)(leave_early)):
        for name, (error, message, took_s) in told:
            assert error == "PeerLostError", f"{name}: {message}"
            assert took_s < SOON_S, f"{name}: {took_s}"
            assert message.startswith("rank 1 (h"), message
            assert " left the group (its script ended, or it destroyed the process group), detected by rank " in message
            assert told_to(number, message), message


def die_and_leave_a_child() -> tuple[str, str, float]:
    dist.init_process_group()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    if rank() == 1:
        if os.fork() == 0:  # like a DataLoader that creates a worker
            time.sleep(60)
            os._exit(0)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return told_by(lambda: [dist.barrier(), dist.all_reduce(torch.ones(100_000))])  # rank 1 may leave the barrier first


def test_a_child_that_outlives_a_rank_does_not_hide_its_death(hosts):
    with hosts(3, 1).start(die_and_leave_a_child) as run:
        told = run.join(60, expect_dead={1})
    for error, message, took_s in (told[0], told[2]):
        assert error == "PeerLostError" and took_s < SOON_S
        assert message.startswith(f"rank 1 (h1, pid {run.pids[1]}) died")


def die_together() -> tuple[str, str, float] | None:
    dist.init_process_group(timeout=timedelta(seconds=60))
    if rank() in (1, 3):
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    # A rank that has left the barrier may die before the other ranks have left it.
    return told_by(lambda: [dist.barrier(), dist.all_reduce(torch.ones(300_000))])


def test_more_than_one_death(hosts):
    with hosts(2, 2).start(die_together) as run:
        told = run.join(60, expect_dead={1, 3})
    for error, message, took_s in (told[0], told[2]):
        assert error == "PeerLostError" and took_s < SOON_S
        assert message.startswith(("rank 1 (h0, pid ", "rank 3 (h1, pid "))
