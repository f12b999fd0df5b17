"""Programs in which ranks wait for a rank that is itself waiting for a stopped rank, and the errors that they raise."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
from hosts.talking import await_word, rank, say
from hosts.telling import told_by
from launching import kill, sleep_for_a_while, wait_until
from world import World

import paceline as dist
from paceline.comm.group.default import NonMember

STOPPED = 3
LONG = timedelta(seconds=60)
WAYS = ("recv", "send", "a group of two", "a group of two, async")


def wait_for_the_stopped(way: str, pair: dist.ProcessGroup, limit: timedelta) -> object:
    if way == "recv":
        return dist.recv(torch.empty(3), STOPPED, timeout=limit)
    if way == "send":
        return dist.send(torch.ones(100_000), STOPPED, timeout=limit)
    work = dist.all_reduce(torch.ones(3), group=pair, async_op="async" in way, timeout=limit)
    return work if work is None else work.wait()


def begin_and_stop(directory: str, waiter: int, algorithm: str | None = None) -> dist.ProcessGroup | NonMember:
    """Starts a job and stops rank 3; returns a group of ranks 3 and `waiter`."""
    dist.init_process_group(timeout=LONG, algorithm=algorithm)
    pair = dist.new_group([waiter, STOPPED])
    dist.barrier()
    if rank() == STOPPED:
        say(directory, "about to be stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
    return pair


def be_held_up(directory: str, way: str, waiter: int, algorithm: str | None = None) -> tuple[str, str, float]:
    """Stops rank 3, for which `waiter` waits; the other two ranks wait for `waiter`. Returns the error of this rank."""
    pair = begin_and_stop(directory, waiter, algorithm)
    if rank() == waiter:
        assert isinstance(pair, dist.ProcessGroup)
        await_word(directory, "stopped")
        say(directory, "about to wait")
        return told_by(lambda: wait_for_the_stopped(way, pair, LONG))
    await_word(directory, "waits")
    told = told_by(lambda: dist.broadcast(torch.ones(3), waiter, timeout=timedelta(seconds=1)))
    say(directory, f"told {rank()}")
    return told


def told_of(run: World, directory: str, waiter: int) -> list[str]:
    """Runs `be_held_up` in a world; returns the error messages of the ranks that waited for `waiter`."""
    others = [number for number in range(STOPPED) if number != waiter]
    await_word(directory, "about to be stopped")
    wait_until(lambda: state_is_stopped(run.pids[STOPPED]))
    say(directory, "stopped")
    await_word(directory, "about to wait")
    wait_until(lambda: sleep_for_a_while(run.pids[waiter]))
    say(directory, "waits")
    await_word(directory, *(f"told {number}" for number in others))
    kill([run.pids[waiter]])  # unless it also raised an error and exited
    told = run.join(60, expect_dead=frozenset({waiter, STOPPED}))
    messages = []
    for number in others:
        error, message, _ = told[number]
        assert error == "CollectiveTimeoutError", message
        messages.append(message)
    return messages


def state_is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def require_cause(messages: list[str], waiting: str, stopped: str, may_be_direct: bool = False) -> None:
    """Asserts that each message names the stopped rank as the cause, and `waiter` as a waiting rank.

    With `may_be_direct`, a rank may also wait directly for the stopped rank, which would have forwarded the data.
    """
    for message in messages:
        if may_be_direct and waiting not in message:
            assert f"; {stopped} did not reach the call (" in message, message
            continue
        why = f"it waits in another call, which is delayed by {stopped}"
        assert f"; {waiting} did not reach the call because {why}" in message, message
        assert f"Look at {stopped} first" in message, message


def compute_beside_a_call(directory: str) -> tuple[str, str, float]:
    """Rank 2 is delayed by its own work, not by the pending asynchronous call with the stopped rank."""
    pair = begin_and_stop(directory, 2)
    if rank() == 2:
        work = dist.all_reduce(torch.ones(3), group=pair, async_op=True)
        say(directory, "computes")
        await_word(directory, "told 0", "told 1")
        dist.destroy_process_group()
        assert work is not None  # kept until now, because its destructor would wait for the call
        return "nothing", "", 0.0
    await_word(directory, "computes")
    told = told_by(lambda: dist.broadcast(torch.ones(3), 2, timeout=timedelta(seconds=1)))
    say(directory, f"told {rank()}")
    return told


def give_up_and_leave(directory: str) -> tuple[str, str, float]:
    """Rank 2 times out in a group with the stopped rank and leaves, while the other ranks wait for rank 2."""
    pair = begin_and_stop(directory, 2)
    if rank() == 2:
        assert isinstance(pair, dist.ProcessGroup)
        told = told_by(lambda: wait_for_the_stopped("a group of two", pair, timedelta(seconds=0.5)))
        dist.destroy_process_group()
        return told
    return told_by(lambda: dist.broadcast(torch.ones(3), 2))
