"""If a rank times out or dies while groups form, errors on the others name the rank and the reason within a second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

import paceline as dist
from hosts.talking import rank
from paceline.comm.engine.native import bootstrap, connections, cost_measurement, engine

ENDLESS = timedelta(minutes=5)
AT_ONCE_S = 30.0  # normally about a second, but the machine may be busy

Told = tuple[str, str, float]


def init(**arguments: str) -> Told:
    started = time.monotonic()
    with pytest.raises((dist.RendezvousError, dist.CollectiveError, ValueError)) as caught:
        dist.init_process_group(timeout=ENDLESS, **arguments)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def give_up(odd: int, how: str) -> Told:
    if rank() == odd:
        if how == "interface":
            return init(interface="eth7")
        if how == "costs":
            os.environ["PACELINE_COSTS"] = "cheap"
        elif how == "algorithm":
            return init(algorithm="rign")
    return init()


@pytest.mark.parametrize(
    ("odd", "how", "reason"),
    [
        (0, "interface", "ValueError: h0 has no interface 'eth7'; it has lo, eth0"),
        (2, "interface", "ValueError: h1 has no interface 'eth7'; it has lo, eth0"),
        (0, "costs", "ValueError: PACELINE_COSTS is 'cheap'"),
        (1, "algorithm", "ValueError: the algorithm is 'rign'"),
    ],
)
def test_one_that_gives_up_says_why_to_all(hosts, odd, how, reason):
    for number, (error, message, took_s) in enumerate(hosts([2, 1])(give_up, odd, how)):
        assert took_s < AT_ONCE_S, message
        if number == odd:
            assert error == "ValueError" and reason.removeprefix("ValueError: ") in message
        else:
            assert error == "RendezvousError"
            assert f"rank {number} (h{number // 2}, pid " in message and "cannot continue: " in message, message
            assert f"rank {odd} (h{odd // 2}, pid " in message and f" gave up: {reason}" in message, message


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


INSTANTS: dict[str, Callable[[], None]] = {
    "before it says where it is": lambda: setattr(bootstrap, "host_id", die),
    "before its host is joined": lambda: setattr(bootstrap, "join_host_mesh", die),
    "before it listens to other hosts": lambda: setattr(engine, "own_address", die),
    "before it connects to them": lambda: setattr(connections, "_dial", die),
    "while costs are measured": lambda: [setattr(cost_measurement, name, die) for name in ("measure", "answer")],
}


def die_when(odd: int, instant: str) -> Told:
    if rank() == odd:
        INSTANTS[instant]()
    return init()


@pytest.mark.parametrize(("odd", "instant"), list(zip([2, 1, 2, 2, 1], INSTANTS, strict=True)))
def test_one_that_dies_is_named_to_all(hosts, odd, instant):
    with hosts([2, 1]).start(die_when, odd, instant) as world:
        told = world.join(60, expect_dead={odd})
    for number in {0, 1, 2} - {odd}:
        error, message, took_s = told[number]
        assert took_s < AT_ONCE_S, message
        assert error in ("RendezvousError", "PeerLostError"), message
        assert f"rank {odd} (h{odd // 2}, pid {world.pids[odd]})" in message, message


@pytest.mark.parametrize("instant", ["before its host is joined", "while costs are measured"])
def test_if_it_served_the_store_that_is_said(hosts, instant):
    with hosts([2, 1]).start(die_when, 0, instant) as world:
        for error, message, took_s in world.join(60, expect_dead={0})[1:]:
            assert took_s < AT_ONCE_S, message
            assert error == "RendezvousError", message
            assert "rank 0" in message and "look at its output" in message, message


def make_groups(odd: int) -> list[Told]:
    dist.init_process_group(timeout=ENDLESS)
    if rank() == odd:
        time.sleep(0.3)
        die()
    started = time.monotonic()
    with pytest.raises(dist.RendezvousError) as caught:
        dist.new_group()
    return [(type(caught.value).__name__, str(caught.value), time.monotonic() - started)]


@pytest.mark.parametrize("odd", [1, 2])
def test_a_rank_that_dies_before_a_later_group_is_named(hosts, odd):
    with hosts([2, 1]).start(make_groups, odd) as world:
        told = world.join(60, expect_dead={odd})
    for number in {1, 2} - {odd}:
        ((_, message, took_s),) = told[number]
        assert took_s < AT_ONCE_S, message
        assert f"rank {odd} (h{odd // 2}, pid {world.pids[odd]})" in message, message
