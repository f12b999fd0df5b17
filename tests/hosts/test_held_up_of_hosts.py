"""Errors that ranks on two hosts raise when they wait for a rank that is itself waiting for a stopped rank."""

from __future__ import annotations

import pytest
from held_up import WAYS, be_held_up, compute_beside_a_call, give_up_and_leave, require_cause, told_of


@pytest.mark.parametrize("waiter", [2, 1], ids=["beside it", "on the other host"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_waits_for_a_stopped_one_is_not_to_blame(hosts, tmp_path, way, waiter):
    with hosts(2, 2).start(be_held_up, str(tmp_path), way, waiter) as run:
        messages = told_of(run, str(tmp_path), waiter)
        waiting = f"rank {waiter} (h{waiter // 2}, pid {run.pids[waiter]})"
        require_cause(messages, waiting, f"rank 3 (h1, pid {run.pids[3]})", may_be_direct=True)


def test_a_rank_that_computes_is_to_blame_for_its_absence(hosts, tmp_path):
    with hosts(2, 2).start(compute_beside_a_call, str(tmp_path)) as run:
        told = run.join(60, expect_dead=frozenset({3}))
        for error, message, _ in told[:2]:
            assert error == "CollectiveTimeoutError"
            assert (
                f"; rank 2 (h1, pid {run.pids[2]}) did not reach the call (" in message and "rank 3 (" not in message
            ), message


def test_a_rank_that_left_after_a_time_out_says_because_of_whom(hosts, tmp_path):
    with hosts(2, 2).start(give_up_and_leave, str(tmp_path)) as run:
        *others, gave_up, _ = run.join(60, expect_dead=frozenset({3}))
        stopped = f"rank 3 (h1, pid {run.pids[3]})"
        assert gave_up[0] == "CollectiveTimeoutError" and f"; {stopped} did not reach the call" in gave_up[1]
        for error, message, _ in others:
            assert error == "PeerLostError"
            assert message.startswith(f"rank 2 (h1, pid {run.pids[2]}) left the group"), message
            assert f"after a call had timed out because of {stopped}" in message, message
