"""The state of the Work object for an asynchronous call, on real processes."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from launching import wait_until

import paceline as dist
from paceline.comm.group.default import own_world


def say(word: str) -> None:
    own_world().store.set(word, "")


def await_word(word: str) -> None:
    own_world().store.wait([word])


def ask_a_work() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((5,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True
    assert work.wait(timedelta(seconds=1)) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor

    # The result is the tensor that was passed, even if the call used copies or parts of it.
    strided = torch.full((4, 4), 1.0)[:, 1]
    assert dist.all_reduce(strided, async_op=True).result()[0] is strided
    assert (strided == size).all()
    whole = torch.empty(2 * size)
    (result,) = dist.all_gather_into_tensor(whole, torch.ones(2), async_op=True).result()
    assert result is whole
    gathered = [torch.empty(1) for _ in range(size)]
    results = dist.all_gather(gathered, torch.ones(1), async_op=True).result()
    assert [id(each) for each in results] == [id(each) for each in gathered]

    if rank == 0:
        await_word("asked")
    work = dist.barrier(async_op=True)
    if rank == 1:
        assert not work.is_success()
        with pytest.raises(
            dist.CollectiveTimeoutError, match=r"barrier had not completed after 0\.0 s\. .*wait for it again"
        ):
            work.wait(timedelta(milliseconds=10))
        say("asked")
    work.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_work_answers_as_torch_users_expect(ranks, size):
    ranks(size)(ask_a_work)


def completes_by_itself() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    if rank == 0:
        await_word("seen undone")
    tensor = torch.full((1000, 3), rank + 1.0)[:, 1]
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert work.get_future() is future
    seen: list[str] = []
    chained = future.then(lambda done: (seen.append(threading.current_thread().name), done.value()[0].sum() / 3000)[1])
    if rank == 1:
        assert not future.done()
        say("seen undone")
    wait_until(chained.done)
    assert chained.value() == 1.0
    if rank == 1:
        assert seen == ["paceline-completion"]
    assert future.wait()[0] is tensor
    assert work.is_success()

    many = [torch.full((10,), float(at)) for at in range(50)]
    futures = [dist.all_reduce(each, async_op=True).get_future() for each in many]
    values = torch.futures.wait_all(futures)
    assert all((each[0] == 2.0 * at).all() for at, each in enumerate(values))
    assert sum(thread.name == "paceline-completion" for thread in threading.enumerate()) == 1
    done = dist.barrier(async_op=True)
    done.wait()
    assert done.get_future().wait() == []


def test_a_future_completes_without_anybody_waiting(ranks):
    ranks(2)(completes_by_itself)


def overtake_another_groups_call() -> None:
    dist.init_process_group()
    group = dist.new_group()
    slow = torch.ones(1)
    if dist.get_rank() == 0:
        later = dist.all_reduce(slow, async_op=True).get_future()
    early = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
    assert early.wait()[0] == 2
    if dist.get_rank() == 1:
        later = dist.all_reduce(slow, async_op=True).get_future()
    assert later.wait()[0] == 2


def sleeps_until_the_end() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    message = torch.zeros(3)
    if rank == 1:
        received = dist.irecv(message, 0).get_future()  # this starts the thread
        thread = next(thread for thread in threading.enumerate() if thread.name == "paceline-completion")
        slept = sleeps_of(thread)
        time.sleep(0.3)
        assert sleeps_of(thread) - slept <= 3
        say("slept")
        torch.futures.wait_all([dist.all_reduce(torch.ones(1), async_op=True).get_future()])
        assert not received.done()
        say("seen unreceived")
    else:
        await_word("slept")
        dist.all_reduce(torch.ones(1))
        await_word("seen unreceived")
        dist.send(torch.ones(3), 1)
    if rank == 1:
        assert received.wait()[0].tolist() == [1, 1, 1]
    several = dist.all_reduce_coalesced([torch.ones(3), torch.ones(4, dtype=torch.int64)], async_op=True)
    (values,) = torch.futures.wait_all([several.get_future()])
    assert [each[0] for each in values] == [2, 2]


def sleeps_of(thread: threading.Thread) -> int:
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_the_completion_thread_sleeps_until_a_call_is_over(ranks):
    ranks(2)(sleeps_until_the_end)


def test_a_call_that_overtakes_another_groups_completes_first(ranks):
    ranks(2)(overtake_another_groups_call)


def fail_in_every_way() -> str:
    dist.init_process_group()
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    future = work.get_future()
    after = future.then(lambda done: done.value())
    with pytest.raises(dist.CollectiveMismatchError, match="3 elements.*4 elements"):
        future.wait()
    with pytest.raises(dist.CollectiveMismatchError):
        work.wait()
    with pytest.raises(RuntimeError, match="CollectiveMismatchError.*3 elements"):
        after.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), dist.CollectiveMismatchError)
    with pytest.raises(dist.CollectiveMismatchError):
        work.result()
    dist.barrier()

    work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
    dist.barrier(dist.new_group())
    if work is None:
        os._exit(0)
    with pytest.raises(dist.PeerLostError, match="rank 1"):
        work.get_future().wait()
    return "told"


def test_a_call_that_fails_says_so_in_every_way(ranks):
    with ranks(2).start(fail_in_every_way) as world:
        assert world.join(expect_dead={1})[0] == "told"


def leave_one_behind() -> None:
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True).get_future()
    else:
        time.sleep(0.5)


def test_a_process_ends_with_a_future_that_never_completes(ranks):
    with ranks(2).start(leave_one_behind) as world:
        world.join()
        for process in world.processes:
            process.join(60)
        assert [process.exitcode for process in world.processes] == [0, 0]


def fork_after_a_future() -> int:
    dist.init_process_group(timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    child = os.fork()
    if child == 0:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        os._exit(int(dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_a_completion_thread_of_its_own(ranks):
    assert ranks(1)(fork_after_a_future) == [1]


def ask_from_many_threads() -> None:
    dist.init_process_group()
    for _ in range(200):
        tensor = torch.ones(64, 2)[:, 0]
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        threads = [threading.Thread(target=work.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        future.wait()
        tensor.zero_()
        for thread in threads:
            thread.join()
        assert not tensor.any()  # no thread completed the call a second time


def test_a_call_is_finished_once_whoever_waits(ranks):
    ranks(2)(ask_from_many_threads)
