"""Recovery of torch.distributed programs after a failure: abort, errors, abort hooks and `shrink_group`."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from launching import wait_until
from torch import nn
from torch._C import _distributed_c10d as torch_core
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import _abort_process_group
from torch.nn.parallel import DistributedDataParallel
from torch_programs import keep, torch_group

import paceline

HAS_RECOVERY = hasattr(torch_core, "ErrorType") and hasattr(c10d, "shrink_group")
pytestmark = pytest.mark.skipif(
    not HAS_RECOVERY, reason=f"torch {torch.__version__} has neither get_error nor shrink_group"
)
if HAS_RECOVERY:
    ErrorType, SHRINK_ABORT = torch_core.ErrorType, c10d.SHRINK_ABORT
else:
    ErrorType, SHRINK_ABORT = None, 1

LONG_S = 120
SOON_S = 40.0  # much shorter than the calls' timeout, much longer than the calls take


def soon(is_so: Callable[[], bool]) -> None:
    wait_until(is_so, SOON_S)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sum_of_ones(group: torch_dist.ProcessGroup | None = None) -> int:
    tensor = torch.ones(40_000)
    torch_dist.all_reduce(tensor, group=group)
    assert (tensor == tensor[0]).all()
    return int(tensor[0])


def abort_what_all_wait_for(directory: str, how: str) -> str:
    with torch_group("paceline", directory, LONG_S):
        group = torch_dist.group.WORLD
        assert group.get_error() == ErrorType.SUCCESS
        ran: list[int] = []
        group.register_abort_hook(1, lambda: ran.append(1))
        group.register_abort_hook(2, lambda: ran.append(2))
        group.unregister_abort_hook(2)
        group.unregister_abort_hook(3)
        torch_dist.barrier()
        aborter = torch_dist.get_rank() == 2
        timer = threading.Timer(0.3, group.abort)
        if aborter:
            timer.start()
        started = time.monotonic()
        with pytest.raises(paceline.GroupAbortedError) as caught:
            if how == "message":
                torch_dist.recv(torch.ones(3), (torch_dist.get_rank() + 1) % 3)
            elif aborter:
                torch_dist.recv(torch.ones(3), 0)
            else:
                torch_dist.all_reduce(torch.ones(70_000), async_op=True).wait()
        assert time.monotonic() - started < SOON_S
        assert caught.value.rank == 2, caught.value
        if aborter:
            timer.join()
            Path(directory, "heard").touch()
        soon(lambda: group.get_error() == ErrorType.COMM_ERROR)
        with pytest.raises(paceline.GroupAbortedError, match="rank 2|aborted by this process"):
            torch_dist.all_reduce(torch.ones(3))
        soon(lambda: ran == [1])
        soon(Path(directory, "heard").exists)  # if two ranks abort at the same time, either may be named
        group.abort()
        assert ran == [1] and group.get_error() == ErrorType.COMM_ERROR
        return str(caught.value)


@pytest.mark.parametrize("how", ["work", "message"])
def test_an_abort_ends_what_all_ranks_wait_for(ranks, tmp_path, how):
    told = ranks(3)(abort_what_all_wait_for, str(tmp_path), how)
    assert "because this process aborted the group" in told[2]
    for rank in (0, 1):
        assert "because rank 2 (" in told[rank] and told[rank].startswith(f"rank {rank} (")


def abort_all_and_begin_again(directory: str) -> None:
    before = 0
    for turn in range(3):
        os.makedirs(f"{directory}/{turn}", exist_ok=True)
        with torch_group("paceline", f"{directory}/{turn}"):
            group = torch_dist.new_group([1, 0])
            assert sum_of_ones() == sum_of_ones(group) == 2
            torch_dist.barrier()
            _abort_process_group(group)
            assert sum_of_ones() == 2
            torch_dist.barrier()
            _abort_process_group()
            with pytest.raises(paceline.GroupAbortedError):
                group.allreduce([torch.ones(3)])
            assert not torch_dist.is_initialized()
        gc.collect()
        now = len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))
        before = now if turn == 0 else before
        assert now <= before, "an aborted group keeps nothing, although the program keeps the group"


def test_aborted_groups_are_gone_and_others_can_be_made(ranks, tmp_path):
    ranks(2)(abort_all_and_begin_again, str(tmp_path))


def time_out(directory: str) -> None:
    with torch_group("paceline", directory, 1):
        group, ran = torch_dist.group.WORLD, threading.Event()
        group.register_abort_hook(0, ran.set)
        group.register_abort_hook(1, lambda: 1 / 0)
        logging.disable()
        if torch_dist.get_rank() == 0:
            work = torch_dist.all_reduce(torch.ones(4), async_op=True)
            assert ran.wait(SOON_S), "nobody waits for the call, and the hook must run nevertheless"
            assert group.get_error() == ErrorType.TIMEOUT
            with pytest.raises(paceline.CollectiveTimeoutError):
                work.wait()
            ran.clear()
            group.abort()
            assert not ran.is_set() and group.get_error() == ErrorType.TIMEOUT  # the first reason is kept
        else:
            soon(lambda: group.get_error() != ErrorType.SUCCESS)


def test_a_time_out_is_told_and_runs_the_abort_hooks(ranks, tmp_path):
    ranks(2)(time_out, str(tmp_path))


def notice_a_death(directory: str) -> None:
    with torch_group("paceline", directory, LONG_S):
        group, ran = torch_dist.group.WORLD, threading.Event()
        group.register_abort_hook(0, ran.set)
        torch_dist.barrier()
        if torch_dist.get_rank() == 1:
            die()
        soon(lambda: group.get_error() == ErrorType.REMOTE_ERROR)  # the failure is detected without a call
        with pytest.raises(paceline.PeerLostError):
            torch_dist.barrier()
        assert ran.is_set()


def test_a_death_is_told_without_a_call(ranks, tmp_path):
    with ranks(3).start(notice_a_death, str(tmp_path)) as world:
        world.join(60, expect_dead={1})


def shrink_twice(directory: str) -> tuple[int, list[int]]:
    with torch_group("paceline", directory, LONG_S):
        first = torch_dist.get_rank()
        torch_dist.new_group([0, 1, 2, 3])  # this group is destroyed with the first default group
        model = DistributedDataParallel(nn.Linear(3, 1))
        sums = []
        for dies, left in ((1, 3), (0, 2)):  # first rank 1, then the new rank 0
            model(torch.ones(2, 3)).sum().backward()
            if torch_dist.get_rank() == dies:
                die()
            with pytest.raises(paceline.PeerLostError, match=rf"rank {dies} \("):
                sum_of_ones()
            group = torch_dist.shrink_group([dies])
            assert group is torch_dist.group.WORLD and torch_dist.get_world_size() == left
            assert group.get_error() == ErrorType.SUCCESS
            sums.append(sum_of_ones())
            total = torch.tensor([float(torch_dist.get_rank())])
            torch_dist.broadcast(total, left - 1)
            assert total == left - 1
            paceline.all_reduce(total)
            assert total == (left - 1) * left and paceline.get_rank() == torch_dist.get_rank()
            gathered = [None] * left
            torch_dist.all_gather_object(gathered, torch_dist.get_rank(), group=torch_dist.new_group())
            assert gathered == list(range(left))
            model = DistributedDataParallel(nn.Linear(3, 1))
        assert {1: 3, 2: 0, 3: 1, 0: 9}[first] == torch_dist.get_rank()
        return torch_dist.get_rank(), sums


def test_survivors_of_kills_go_on_with_consecutive_ranks(ranks, tmp_path):
    with ranks(4).start(shrink_twice, str(tmp_path)) as world:
        told = world.join(90, expect_dead={0, 1})
    assert told[2] == (0, [3, 2]) and told[3] == (1, [3, 2])


def shrink_without_all_the_dead(directory: str) -> None:
    with torch_group("paceline", directory, LONG_S):
        group = torch_dist.new_group([3, 2, 1, 0])  # torch sorts the ranks
        torch_dist.barrier()
        if torch_dist.get_rank() in (1, 3):
            die()
        with pytest.raises(paceline.PeerLostError):
            sum_of_ones(group)
        started = time.monotonic()
        with pytest.raises(paceline.RendezvousError, match=r"rank (1|3) \(.* died|gave up"):
            torch_dist.shrink_group([1], group)
        assert time.monotonic() - started < SOON_S
        smaller = torch_dist.shrink_group([1, 3], group)
        assert (smaller.rank(), smaller.size()) == (torch_dist.get_rank() // 2, 2)
        assert torch_dist.get_process_group_ranks(smaller) == [0, 2]
        assert sum_of_ones(smaller) == 2


def test_a_shrink_that_forgets_a_dead_rank_names_it(ranks, tmp_path):
    with ranks(4).start(shrink_without_all_the_dead, str(tmp_path)) as world:
        world.join(90, expect_dead={1, 3})


def exclude_the_living(directory: str, flags: int) -> None:
    with torch_group("paceline", directory, LONG_S):
        group = torch_dist.new_group([0, 1, 2])
        if torch_dist.get_rank() == 1:
            expected = paceline.GroupAbortedError if flags else paceline.PeerLostError
            with pytest.raises(expected):
                sum_of_ones(group)
        else:
            time.sleep(0.2)
            smaller = torch_dist.shrink_group([1], group, shrink_flags=flags)
            assert sum_of_ones(smaller) == 2
            with pytest.raises(ValueError, match="has no options"):
                torch_dist.shrink_group([1 - smaller.rank()], smaller, pg_options=object())
        assert sum_of_ones() == 3


@pytest.mark.parametrize("flags", [0, SHRINK_ABORT])
def test_a_living_rank_that_is_excluded_does_not_wait(ranks, tmp_path, flags):
    ranks(3)(exclude_the_living, str(tmp_path), flags)


def shrink_what_cannot_be_shrunk(directory: str) -> None:
    with torch_group("paceline", directory), pytest.raises(TypeError, match="does not support shrinking"):
        others = keep(torch_dist.new_group(backend="gloo"))
        sum_of_ones(others)  # rank 1 leaves at once, but gloo's new_group does not wait until all ranks are connected
        if torch_dist.get_rank() == 0:
            torch_dist.shrink_group([1])
        torch_dist.shrink_group([1 - torch_dist.get_rank()], others)


def test_groups_of_other_backends_are_treated_as_before(ranks, tmp_path):
    ranks(2)(shrink_what_cannot_be_shrunk, str(tmp_path))
