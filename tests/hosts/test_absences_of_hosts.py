"""Errors that ranks on several hosts raise when one of them is absent, stopped or interrupted."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
from launching import sleep_for_a_while, wait_until

import paceline as dist
from hosts.talking import await_word, rank, say
from hosts.telling import CALLS, SOON_S, told_by, world


def stay_away(directory: str) -> list[tuple[str, str, float]]:
    dist.init_process_group(timeout=timedelta(seconds=60))
    told = []
    for number, call in enumerate([*CALLS.values(), None]):
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        for _ in range(5):  # too short for a rank to report that it is waiting
            dist.all_reduce(torch.ones(3), group=group)
        if call is not None:
            group.set_timeout(timedelta(seconds=0.5))
        if rank() == 1:
            await_word(directory, f"told {number}")
            told.append(told_by(lambda group=group: dist.all_reduce(torch.ones(3), group=group)))
        elif call is not None:
            told.append(told_by(lambda call=call, group=group: call(group)))
        else:
            limit = timedelta(seconds=0.5)
            told.append(told_by(lambda group=group, limit=limit: dist.barrier(group, timeout=limit)))
        say(directory, f"told {number}")
        dist.barrier()
        dist.destroy_process_group(group)
    return told


def test_a_rank_that_stays_away_is_named_with_its_latest_call(hosts, tmp_path):
    in_time, late = hosts(2, 1)(stay_away, str(tmp_path))
    for error, message, took_s in in_time:
        assert error == "CollectiveTimeoutError", message
        assert message.startswith("rank 0 (h0, pid ") and "timed out after 0.5 s" in message
        assert "rank 1 (h1, pid " in message and "latest all_reduce(float32, 3 elements, SUM) as call 6" in message
        assert 0.5 <= took_s < SOON_S
    for error, message, _ in late:
        assert error == "CollectiveTimeoutError", message
        assert message.startswith("rank 1 (h1, pid ") and " on rank 0 (h0, pid " in message
        assert "which was waiting for this rank" in message and "did not reach the call" not in message


def receive_from_each_other() -> tuple[str, str]:
    dist.init_process_group()
    limit = timedelta(seconds=0.3 if rank() == 0 else 20)
    told = told_by(lambda: world().recv(torch.empty(1), 1 - rank(), async_op=False, timeout=limit))
    return told[1], told_by(dist.barrier)[0]


def test_ranks_that_receive_from_each_other_are_told_the_truth(hosts):
    (first, then_first), (second, then_second) = hosts(2, 1)(receive_from_each_other)
    assert "rank 1 (h1, pid " in first and "did not reach the call" in first
    assert "on rank 0 (h0, pid " in second and "was waiting for this rank" in second
    assert "did not reach the call" not in second
    for message in (first, second):
        assert "This group can no longer be used" in message
    assert then_first == then_second == "CollectiveTimeoutError"


def be_stopped() -> tuple[str, str, float] | None:
    dist.init_process_group()
    dist.barrier()
    if rank() == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return told_by(lambda: dist.all_reduce(torch.ones(500_000), timeout=timedelta(seconds=2)))


def test_a_stopped_process_ends_in_a_time_out_that_names_it(hosts):
    with hosts(2, 2).start(be_stopped) as run:
        told = run.join(60, expect_dead={3})
    for error, message, took_s in told[:3]:
        assert error == "CollectiveTimeoutError" and took_s < SOON_S
        assert f"rank 3 (h1, pid {run.pids[3]}) did not reach the call" in message


def be_stopped_inside(directory: str) -> tuple[str, str, float]:
    dist.init_process_group(timeout=timedelta(seconds=20), algorithm="star")
    dist.barrier()
    limit = timedelta(seconds=1 if rank() == 1 else 3)
    say(directory, f"called {rank()}")
    if rank() == 0:  # the center of the star, so that rank 3 is stopped while it has most of its tensor to send
        await_word(directory, "stopped")
    return told_by(lambda: dist.all_reduce(torch.ones(4_000_000), timeout=limit))


def test_a_rank_stopped_inside_its_call_is_named_by_all(hosts, tmp_path):
    with hosts(2, 2).start(be_stopped_inside, str(tmp_path)) as run:
        await_word(str(tmp_path), "called 3")
        wait_until(lambda: sleep_for_a_while(run.pids[3]))  # rank 3 has reported the call in which it waits
        run.kill(3, signal.SIGSTOP)
        say(str(tmp_path), "stopped")
        told = run.join(60, expect_dead={3})
    for error, message, took_s in told[:3]:
        assert error == "CollectiveTimeoutError" and took_s < SOON_S
        assert f"rank 3 (h1, pid {run.pids[3]}) reached the call but did not complete it" in message
        assert "did not reach the call" not in message


def interrupt_one_rank(directory: str) -> str:
    dist.init_process_group()
    dist.barrier()
    if rank() == 1:
        await_word(directory, "interrupted")
        return told_by(dist.barrier)[1]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        world().recv(torch.empty(1), async_op=False)
    say(directory, "interrupted")
    return told_by(dist.barrier)[1]


def test_an_interrupt_is_told_to_the_others(hosts, tmp_path):
    for number, message in enumerate(hosts(2, 1)(interrupt_one_rank, str(tmp_path))):
        assert message.startswith(f"rank {number} (h{number}, pid ") and "interrupted" in message
        assert "  " not in message
        assert number == 0 or "on rank 0 (h0, pid " in message, message
