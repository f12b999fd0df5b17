"""A destroyed group leaves nothing behind: no thread, no descriptor, no shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from world import reserved_port

import paceline as dist
from hosts.talking import await_word, rank, say

_SETTLED_S = 30.0  # time for threads to exit after they have been asked to


def held() -> Counter[str]:
    """Returns this process's threads, descriptors and shared memory, by kind."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has exited in the meantime
            found["thread " + (task / "comm").read_text().strip()] += 1
    for name in os.listdir("/proc/self/fd"):
        try:
            found["descriptor " + os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:" in line:
            found["memory " + line.split("memfd:")[1]] += 1
    return found


def left_behind(before: Counter[str]) -> Counter[str]:
    deadline = time.monotonic() + _SETTLED_S
    while (left := held() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return left


def _use(group: dist.ProcessGroup) -> None:
    for count in (1, 1000, 400_000):
        dist.all_reduce(torch.ones(count), group=group)
        work = dist.all_reduce(torch.ones(count), group=group, async_op=True)
        assert work is not None
        work.wait()
    peer = group.size() - 1 - group.rank()
    if peer != group.rank():
        received = group.recv(torch.empty(50_000), peer, async_op=True)
        group.send(torch.ones(50_000), peer, async_op=False)
        received.wait()


def _init(timeout_s: float) -> dist.ProcessGroup:
    dist.init_process_group(timeout=timedelta(seconds=timeout_s))
    group = dist.GroupMember.WORLD
    assert group is not None
    return group


def warm_up() -> Counter[str]:
    """Runs one round, so that objects that torch and Python create once per process already exist."""
    place = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(reserved_port()))
    _use(_init(5))
    dist.destroy_process_group()
    os.environ.update(place)
    gc.collect()
    time.sleep(0.1)
    return held()


def twenty_rounds() -> Counter[str]:
    before = warm_up()
    for _ in range(20):
        _use(_init(60))
        if dist.get_world_size() > 2:
            sub = dist.new_group([0, dist.get_world_size() - 1])
            if isinstance(sub, dist.ProcessGroup):
                _use(sub)
        dist.barrier()
        dist.destroy_process_group()
    return left_behind(before)


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
def test_nothing_is_left_after_twenty_rounds(hosts, layout):
    assert hosts(*layout)(twenty_rounds) == [Counter()] * (layout[0] * layout[1])


def _mismatch(_: str) -> None:
    dist.all_reduce(torch.ones(5 + rank()))


def _stay_away(directory: str) -> None:
    if rank() == 1:
        await_word(directory, "told 0", "told 2")
    dist.all_reduce(torch.ones(300_000))


def _be_killed(_: str) -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(3)]
    for work in works:
        assert work is not None
        work.wait()


def _leave(_: str) -> None:
    if rank() == 1:
        dist.destroy_process_group()
        return
    world = dist.GroupMember.WORLD
    assert world is not None
    world.recv(torch.empty(5), 1, async_op=True).wait()


def _be_interrupted(directory: str) -> None:
    if rank() == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            dist.barrier()
        say(directory, "interrupted")
    elif rank() == 0:
        await_word(directory, "interrupted")
    dist.barrier()


def _vanish(directory: str) -> None:
    say(directory, str(rank()))
    await_word(directory, "cut")
    dist.all_reduce(torch.ones(300_000))


FAILURES: dict[str, Callable[[str], None]] = {
    "mismatch": _mismatch,
    "timeout": _stay_away,
    "death": _be_killed,
    "leaving": _leave,
    "interrupt": _be_interrupted,
    "cut": _vanish,
}


def fail_on_one_rank(how: str, directory: str) -> Counter[str]:
    before = warm_up()
    group = _init(60)
    _use(group)
    group.set_timeout(timedelta(seconds=2))
    say(directory, f"ready {rank()}")  # a failure on one rank ends the pending calls of all ranks
    await_word(directory, *(f"ready {each}" for each in range(dist.get_world_size())))
    try:
        FAILURES[how](directory)
        told = rank() == 1 and how == "leaving"
    except dist.CollectiveError:
        told = True
    say(directory, f"told {rank()}")
    assert told
    if dist.is_initialized():
        dist.destroy_process_group()
    return left_behind(before)


@pytest.mark.parametrize("how", FAILURES)
def test_nothing_is_left_after_a_failure(hosts, how, tmp_path):
    with hosts([1, 2] if how != "cut" else [1, 1], bridged=how == "cut").start(
        fail_on_one_rank, how, str(tmp_path)
    ) as run:
        if how == "cut":
            await_word(str(tmp_path), "0", "1")
            run.cut_host(1)
            say(str(tmp_path), "cut")
        for number, left in enumerate(run.join(60, expect_dead={1} if how == "death" else ())):
            assert not left, (number, left)


def fail_to_meet(how: str) -> Counter[str]:
    before = warm_up()
    if how == "missing" and rank() == 2:
        return Counter()
    if how == "secret" and rank() == 1:
        os.environ["PACELINE_SECRET"] = "not the secret of this job, but as long"
    if how == "connection" and rank() == 1:

        def refuse(*_: object, **__: object) -> socket.socket:
            raise OSError("no route")

        from paceline.comm.engine.native import connections

        connections._dial = refuse
    algorithm = "ring" if how == "settings" and rank() == 1 else None
    interface = "eth7" if how == "interface" and rank() == 1 else None
    with pytest.raises((dist.PacelineError, ValueError)):
        dist.init_process_group(timeout=timedelta(seconds=2), algorithm=algorithm, interface=interface)
    # The caught error keeps the objects of the failed call alive, but only their wake-up descriptors are still open.
    assert not {what for what in left_behind(before) if what != "descriptor anon_inode"}, left_behind(before)
    return left_behind(before)


@pytest.mark.parametrize("how", ["missing", "secret", "settings", "interface", "connection"])
def test_nothing_is_left_of_a_group_that_did_not_form(hosts, how):
    for number, left in enumerate(hosts([1, 2])(fail_to_meet, how)):
        assert not left, (number, left)
