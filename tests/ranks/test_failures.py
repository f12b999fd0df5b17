"""Errors on a rank when another rank dies, is absent, leaves or runs a different call."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import threading
import time
from datetime import timedelta

import pytest
import torch
from hosts.talking import await_word, say
from launching import sleep_for_a_while, wait_until

import paceline as dist


def wait_for_the_dead(asynchronous: bool) -> tuple[str, int]:
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError) as caught:
        work = dist.all_reduce(torch.ones(100_000), async_op=asynchronous)
        assert work is not None
        work.wait()
    with pytest.raises(dist.PeerLostError):
        dist.barrier()
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_dead_rank_is_named_to_every_waiter(ranks, asynchronous):
    with ranks(4).start(wait_for_the_dead, asynchronous) as world:
        told = world.join(60, expect_dead=frozenset({1}))
    for rank in (0, 2, 3):
        message, lost = told[rank]
        assert lost == 1
        assert f"rank 1 ({os.uname().nodename}, pid {world.pids[1]}) died, detected by rank " in message
        assert re.search(rf"(detected by|which reported it to) rank {rank} \(", message)
        assert "all_reduce(float32, 100000 elements, SUM)" in message


def die_with_open_sockets(algorithm: str | None) -> int:
    dist.init_process_group(algorithm=algorithm, timeout=timedelta(seconds=60))
    if dist.get_rank() == 1:
        dist.barrier()
        sockets = [int(fd) for fd in os.listdir("/proc/self/fd") if stat.S_ISSOCK(_mode(f"/proc/self/fd/{fd}"))]
        subprocess.Popen(["sleep", "60"], pass_fds=sockets)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLostError) as caught:
        dist.barrier()  # the dying rank may leave the barrier before the others
        dist.all_reduce(torch.ones(100_000))
    return caught.value.rank


def _mode(path: str) -> int:
    return os.stat(path).st_mode if os.path.exists(path) else 0


# A process that dies closes its sockets last, after its memory has been freed. In this test, they are never closed.
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_a_death_is_known_before_the_sockets_close(ranks, algorithm):
    with ranks(3).start(die_with_open_sockets, algorithm) as world:
        assert world.join(60, expect_dead=frozenset({1})) == [1, None, 1]


def stay_away(directory: str) -> str | None:
    dist.init_process_group()
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 2:
        await_word(directory, "0", "1")
        return None
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        dist.broadcast(torch.ones(3), 0, timeout=timedelta(seconds=0.5))
    say(directory, str(dist.get_rank()))
    assert isinstance(caught.value, TimeoutError)
    return str(caught.value)


def test_a_rank_that_stays_away_is_named_with_its_latest_call(ranks, tmp_path):
    told = ranks(3)(stay_away, str(tmp_path))
    for rank in (0, 1):
        assert told[rank].startswith(f"rank {rank} (")
        assert "broadcast(float32, 3 elements, root 0) timed out after 0.5 s" in told[rank]
        assert "rank 2 (" in told[rank]
        assert "latest all_reduce(float32, 3 elements, SUM)" in told[rank]


def be_stopped() -> str | None:
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    with pytest.raises(dist.CollectiveTimeoutError, match="rank 0 .* did not reach the call") as caught:
        dist.barrier(timeout=timedelta(seconds=1))
    return str(caught.value)


def test_a_stopped_rank_ends_in_a_time_out_not_in_a_hang(ranks):
    with ranks(2).start(be_stopped) as world:
        world.join(expect_dead=frozenset({0}))


def leave_early() -> None:
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(dist.PeerLostError, match=r"rank 1 .* left the group .*detected by rank 0"):
        dist.barrier()


def test_a_rank_that_left_is_told_from_one_that_died(ranks):
    ranks(2)(leave_early)


def exchange_seven_elements() -> None:
    sizes = [2] * (dist.get_world_size() - 1)
    sizes.append(7 - sum(sizes))
    dist.all_to_all_single(torch.empty(7), torch.ones(7), sizes, sizes)


def make_calls_that_do_not_match() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    calls = [
        (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.broadcast(torch.ones(4), 0), "all_reduce.*broadcast"),
        (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(5)), "4 elements.*5 elements"),
        (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(4).double()), "float32.*float64"),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX),
            "SUM.*MAX",
        ),
        (lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.broadcast(torch.ones(4), 1), "root 0.*root 1"),
        (lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(100_000)), "barrier.*all_reduce"),
        (lambda: dist.barrier(), exchange_seven_elements, r"barrier.*all_to_all\(float32, 7 elements\)"),
    ]
    for first, second, message in calls:
        with pytest.raises(dist.CollectiveMismatchError, match=f"rank 0 .* called .*{message}"):
            (second if rank == 1 else first)()
        good = torch.ones(70_000)
        dist.all_reduce(good)
        assert (good == dist.get_world_size()).all()


@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_do_not_match_fail_on_every_rank(ranks, size):
    ranks(size)(make_calls_that_do_not_match)


def give_bad_arguments() -> None:
    dist.init_process_group()
    with pytest.raises(TypeError, match="AVG is not defined for torch.bool; convert the tensor first"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(TypeError, match="SUM is not defined for torch.float8_e5m2"):
        dist.all_reduce(torch.ones(3).to(torch.float8_e5m2))
    with pytest.raises(TypeError, match="to_dense"):
        dist.broadcast(torch.ones(3).to_sparse(), 0)
    with pytest.raises(TypeError, match="to_dense"):
        dist.isend(torch.ones(3).to_sparse(), 1 - dist.get_rank())
    with pytest.raises(TypeError, match=r"on meta; .*tensor\.cpu\(\)"):
        dist.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(TypeError, match="all tensors of a call must have the same type"):
        dist.all_reduce([torch.ones(1), torch.ones(1).double()])
    with pytest.raises(ValueError, match="needs one entry for each of the 2 ranks, not 1"):
        dist.all_gather([torch.ones(1)], torch.ones(1))
    with pytest.raises(ValueError, match="entry 0 of the list of outputs has 2 elements; all must have 1"):
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(1))
    own = (
        f"rank {dist.get_rank()}: .*: entry {dist.get_rank()} of .*, which is this rank's, has [23] elements, but .* 1;"
    )
    with pytest.raises(ValueError, match=own):
        dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(1))
    with pytest.raises(ValueError, match=own):
        dist.reduce_scatter(torch.ones(1), [torch.ones(2), torch.ones(3)])
    for call in (dist.all_gather, dist.reduce_scatter):
        several, own_one = [torch.ones(1), torch.ones(2)], torch.ones(1 + dist.get_rank())
        arguments = (several, own_one) if call is dist.all_gather else (own_one, several)
        with pytest.raises(ValueError, match=f"{call.__name__} of tensors that differ in size .*wire='int8' was given"):
            call(*arguments, wire="int8")
    with pytest.raises(ValueError, match="broadcast: src is 5, which is not in"):
        dist.broadcast(torch.ones(1), 5)
    with pytest.raises(ValueError, match="are mutually exclusive"):
        dist.broadcast(torch.ones(1), 0, group_src=0)
    with pytest.raises(ValueError, match="rank 7 is not in the default group of 2 ranks"):
        dist.new_group([0, 7])
    with pytest.raises(TypeError, match=r"PremulSum\(factor\)"):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.PREMUL_SUM)
    dist.barrier()


def test_bad_arguments_are_refused_before_anything_is_sent(ranks):
    ranks(2)(give_bad_arguments)


def fork_in_between() -> int:
    dist.init_process_group()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    rank = dist.get_rank()
    child = os.fork()
    if child == 0:  # a DataLoader's worker splits an IterableDataset by rank, as with torch.distributed
        is_known = dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (rank, 2)
        try:
            dist.barrier()
        except ValueError as error:
            is_refused = f"this process was forked from rank {rank}, and cannot use the groups" in str(error)
        dist.destroy_process_group()
        os._exit(0 if is_known and is_refused and not dist.is_initialized() else 1)
    _, status = os.waitpid(child, 0)
    dist.barrier()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_no_member_and_does_not_disturb(ranks):
    assert ranks(2)(fork_in_between) == [0, 0]


def interrupt_a_waiting_call(directory: str) -> str:
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 1:
        await_word(directory, "interrupted")
        with pytest.raises(dist.CollectiveError):
            dist.barrier()
        return "told"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(1))
    say(directory, "interrupted")
    return "interrupted"


def test_an_interrupt_ends_a_waiting_call(ranks, tmp_path):
    assert ranks(2)(interrupt_a_waiting_call, str(tmp_path)) == ["interrupted", "told"]


def destroyed_while_another_thread_waits(algorithm: str | None, directory: str) -> str:
    dist.init_process_group(algorithm=algorithm)
    dist.barrier()
    if dist.get_rank() == 1:
        await_word(directory, "destroyed")
        with pytest.raises(dist.CollectiveError) as told:
            dist.barrier()
        return str(told.value)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            dist.all_reduce(torch.ones(100_000))
        except dist.CollectiveError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: sleep_for_a_while(waiter.native_id))
    dist.destroy_process_group()
    say(directory, "destroyed")
    waiter.join(60)
    assert not waiter.is_alive()
    return str(caught[0])


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_destroying_a_group_ends_the_wait_of_another_thread(ranks, algorithm, tmp_path):
    for message in ranks(2)(destroyed_while_another_thread_waits, algorithm, str(tmp_path)):
        assert "interrupted" in message or "rank 0" in message
