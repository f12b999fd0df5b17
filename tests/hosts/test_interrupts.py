"""Ctrl-C on one host, in a collective or while groups form, raises KeyboardInterrupt there and errors elsewhere."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch
from launching import sleep_for_a_while, wait_until

import paceline as dist
from hosts.talking import await_word, rank, say
from paceline.comm.engine.native import engine as native


def reduce_until_interrupted(ready: str) -> str:
    dist.init_process_group(timeout=timedelta(seconds=60))
    dist.barrier()
    say(ready, str(rank()))
    with pytest.raises((KeyboardInterrupt, dist.CollectiveError)) as caught:
        while rank() == 0:
            dist.all_reduce(torch.ones(100))  # rank 1 does not participate
        dist.GroupMember.WORLD.recv(torch.empty(1), 0, async_op=False)
    return f"{caught.type.__name__}: {caught.value}"


def form_until_interrupted(ready: str) -> str:
    def say_and_sleep(*_: object) -> str:
        say(ready, "1")
        time.sleep(60)
        return ""

    say(ready, "0")
    if rank() == 1:
        native.own_address = say_and_sleep
    with pytest.raises((KeyboardInterrupt, dist.RendezvousError)) as caught:
        dist.init_process_group(timeout=timedelta(seconds=60))
    return f"{caught.type.__name__}: {caught.value}"


def test_an_interrupted_forming_is_told(hosts, tmp_path):
    with hosts(2, 1).start(form_until_interrupted, str(tmp_path)) as world:
        await_word(str(tmp_path), "0", "1")
        world.kill(1, signal.SIGINT)
        told = world.join(50)  # before the timeout
    assert told[1].startswith("KeyboardInterrupt")
    assert f"rank 1 (h1, pid {world.pids[1]}) gave up: KeyboardInterrupt" in told[0]


def test_an_interrupted_collective_is_told(hosts, tmp_path):
    with hosts(2, 1).start(reduce_until_interrupted, str(tmp_path)) as world:
        await_word(str(tmp_path), "0", "1")
        wait_until(lambda: sleep_for_a_while(world.pids[0]))  # rank 0 waits in its call and has reported this
        world.kill(0, signal.SIGINT)
        told = world.join(50)
    assert told[0].startswith("KeyboardInterrupt")
    assert told[1].startswith("CollectiveError: rank 1 (h1, ") and "was interrupted on rank 0 (h0, " in told[1]
