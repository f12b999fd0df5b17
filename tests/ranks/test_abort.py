"""`ProcessGroup.abort`: one rank, from any thread, terminates the pending calls of all ranks in a group."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from launching import wait_until

import paceline as dist
from paceline.comm.engine.channel import OutcomeCode

LONG = timedelta(seconds=120)
SOON_S = 40.0  # much shorter than the calls' timeout, much longer than an abort takes


def abort_while_others_wait(how: str, algorithm: str | None) -> str:
    dist.init_process_group(timeout=LONG, algorithm=algorithm)
    group = dist.GroupMember.WORLD
    assert group is not None and group.failure() is OutcomeCode.OK
    aborter = dist.get_rank() == 1
    if aborter:
        dist.barrier()
        time.sleep(0.3)
        group.abort()
        group.abort()
    started = time.monotonic()
    with pytest.raises(dist.GroupAbortedError) as caught:
        if not aborter:
            dist.barrier()  # a rank that is slow to leave the barrier may raise the error here
        if how == "message" and not aborter:
            dist.recv(torch.empty(3), 1)
        elif how == "work":
            works = [dist.all_reduce(torch.ones(70_000), async_op=True) for _ in range(3)]
            errors = [_error_of(work) for work in works]
            assert all(isinstance(error, dist.GroupAbortedError) for error in errors), errors
            raise errors[0]
        else:
            dist.all_reduce(torch.ones(70_000))
    assert time.monotonic() - started < SOON_S
    assert caught.value.rank == 1
    assert group.failure() is OutcomeCode.ABORTED
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(3)), lambda: dist.recv(torch.ones(3))):
        with pytest.raises(dist.GroupAbortedError):
            call()
    dist.destroy_process_group()
    return str(caught.value)


def _error_of(work: dist.Work | None) -> Exception:
    assert work is not None
    with pytest.raises(dist.CollectiveError) as caught:
        work.wait()
    return caught.value


@pytest.mark.parametrize("algorithm", [None, "ring"])
@pytest.mark.parametrize("how", ["synchronous", "work", "message"])
def test_an_abort_ends_the_calls_of_all_ranks(ranks, how, algorithm):
    with ranks(3).start(abort_while_others_wait, how, algorithm) as world:
        told = world.join(60)
        pids = world.pids
    for rank, message in enumerate(told):
        assert message.startswith(f"rank {rank} ({os.uname().nodename}, pid {pids[rank]}): "), message
        who = "this process" if rank == 1 else rf"rank 1 \(.*, pid {pids[1]}\)"
        assert re.search(f"did not complete because {who} aborted the group", message), message


def abort_on_another_thread(algorithm: str | None) -> None:
    dist.init_process_group(timeout=LONG, algorithm=algorithm)
    group = dist.GroupMember.WORLD
    assert group is not None
    dist.barrier()
    if dist.get_rank() == 0:
        timer = threading.Timer(0.3, group.abort)
        timer.start()
        with pytest.raises(dist.GroupAbortedError, match="this process aborted"):
            dist.all_reduce(torch.ones(100_000))
        timer.join()
    else:  # this rank runs no call, but can still query the failure
        deadline = time.monotonic() + SOON_S
        while group.failure() is OutcomeCode.OK:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    dist.destroy_process_group()


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_an_abort_on_another_thread_ends_the_own_call(ranks, algorithm):
    ranks(2)(abort_on_another_thread, algorithm)


def abort_a_subgroup() -> None:
    dist.init_process_group(timeout=LONG)
    group = dist.new_group([2, 0])
    if dist.get_rank() == 0:
        group.abort()
    elif dist.get_rank() == 2:
        with pytest.raises(dist.GroupAbortedError, match=r"rank 2 \(.*because rank 0 \("):
            dist.all_reduce(torch.ones(3), group=group)
    tensor = torch.ones(70_000)
    dist.all_reduce(tensor)  # the other group is not affected
    assert tensor[-1] == 3
    dist.destroy_process_group()


def test_an_abort_leaves_other_groups_alone(ranks):
    ranks(3)(abort_a_subgroup)


def abort_after_a_death() -> None:
    dist.init_process_group(timeout=LONG)
    group = dist.GroupMember.WORLD
    assert group is not None
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while group.failure() is OutcomeCode.OK:  # the failure is detected without a call
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert group.failure() is OutcomeCode.PEER_LOST
    with pytest.raises(dist.PeerLostError, match="rank 1"):
        dist.barrier()
    group.abort()
    with pytest.raises(dist.PeerLostError, match="rank 1"):  # the first reason is kept
        dist.barrier()
    dist.destroy_process_group()


def test_a_death_is_known_without_a_call_and_stays_the_reason(ranks):
    with ranks(3).start(abort_after_a_death) as world:
        world.join(60, expect_dead={1})


def abort_while_threads_reduce() -> None:
    """Many calls of different sizes are pending in both threads of the group when the abort happens."""
    dist.init_process_group(timeout=LONG)
    for turn in range(15):
        group = dist.new_group()
        if turn % dist.get_world_size() == dist.get_rank():
            timer = threading.Timer(0.002 * turn, group.abort)
            timer.start()
        with pytest.raises(dist.GroupAbortedError):
            for count in range(100_000):
                work = dist.all_reduce(torch.ones(1 + 997 * count % 50_000), group=group, async_op=count % 2 == 0)
                if work is not None:
                    work.wait()
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def test_an_abort_at_any_instant_ends_what_runs(ranks):
    ranks(3)(abort_while_threads_reduce)


def shared_memory_after_a_failure(how: str, directory: Path) -> None:
    dist.init_process_group(timeout=LONG)
    group = dist.GroupMember.WORLD
    assert group is not None
    whole = dist.empty_shared(3, 100_003).fill_(1)
    tensor = whole[1]  # neither its start nor its end is at a page boundary
    dist.all_reduce(tensor)
    if dist.get_rank() == 0:
        if how == "abort":
            threading.Timer(0.2, group.abort).start()
        with pytest.raises(dist.CollectiveError):
            dist.all_reduce(tensor, timeout=timedelta(seconds=0.5) if how == "timeout" else None)
        assert (whole[0] == 1).all() and (tensor == 2).all() and (whole[2] == 1).all()
        whole.fill_(7)
        (directory / "failed").touch()
        wait_until((directory / "late").exists)
        assert (whole == 7).all()
    else:
        wait_until((directory / "failed").exists)
        with pytest.raises(dist.CollectiveError):
            dist.all_reduce(tensor)  # rank 0 has left the call, but its memory is still mapped here
        (directory / "late").touch()
    dist.destroy_process_group()
    dist.init_process_group()
    dist.all_reduce(tensor.fill_(2))
    assert (tensor == 4).all()


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_shared_memory_of_a_failed_call_may_be_used_on(ranks, how, tmp_path):
    ranks(2)(shared_memory_after_a_failure, how, tmp_path)
