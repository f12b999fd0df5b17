"""Errors that ranks on one host raise when they wait for a rank that is itself waiting for a stopped rank."""

from __future__ import annotations

import socket

import pytest
from held_up import WAYS, be_held_up, compute_beside_a_call, give_up_and_leave, require_cause, told_of


def named(number: int, pid: int) -> str:
    return f"rank {number} ({socket.gethostname()}, pid {pid})"


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_waits_for_a_stopped_one_is_not_to_blame(ranks, tmp_path, way):
    with ranks(4).start(be_held_up, str(tmp_path), way, 2) as run:
        messages = told_of(run, str(tmp_path), 2)
        require_cause(messages, named(2, run.pids[2]), named(3, run.pids[3]))


@pytest.mark.parametrize("way", ["recv", "a group of two"])
def test_schedules_find_the_same(ranks, tmp_path, way):
    with ranks(4).start(be_held_up, str(tmp_path), way, 2, "ring") as run:
        messages = told_of(run, str(tmp_path), 2)
        require_cause(messages, named(2, run.pids[2]), named(3, run.pids[3]), may_be_direct=True)


def test_a_rank_that_computes_is_to_blame_for_its_absence(ranks, tmp_path):
    with ranks(4).start(compute_beside_a_call, str(tmp_path)) as run:
        told = run.join(60, expect_dead=frozenset({3}))
        for error, message, _ in told[:2]:
            assert error == "CollectiveTimeoutError"
            assert f"; {named(2, run.pids[2])}, {named(3, run.pids[3])} did not reach the call (" in message, message


def test_a_rank_that_left_after_a_time_out_says_because_of_whom(ranks, tmp_path):
    with ranks(4).start(give_up_and_leave, str(tmp_path)) as run:
        *others, gave_up, _ = run.join(60, expect_dead=frozenset({3}))
        stopped = named(3, run.pids[3])
        assert gave_up[0] == "CollectiveTimeoutError" and f"; {stopped} did not reach the call" in gave_up[1]
        for error, message, _ in others:
            assert error == "PeerLostError"
            assert message.startswith(f"{named(2, run.pids[2])} left the group"), message
            assert f"after a call had timed out because of {stopped}" in message, message
