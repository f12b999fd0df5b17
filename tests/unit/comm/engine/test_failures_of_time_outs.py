"""Timeout errors about missing ranks, waiting ranks, and the ranks that the waiting ranks wait for."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.comm.engine.channel import CallFailure, OutcomeCode
from paceline.comm.engine.failures import RankIdentity, to_error

EVERYBODY = [RankIdentity(rank, "host", 100 + rank) for rank in range(6)]
LATEST = [(7, 2, 11, 0, -1, 3)] * 4


def told(failure: CallFailure, group_rank: int = 0) -> str:
    error = to_error(failure, EVERYBODY[:4], group_rank, "barrier()", engine_members=EVERYBODY)
    return str(error)


def timed_out(**seen: object) -> CallFailure:
    return dataclasses.replace(
        CallFailure(OutcomeCode.TIMED_OUT, waited_ns=2 * 10**9, reporter=0, calls=LATEST), **seen
    )


def test_those_who_did_not_come_are_named():
    message = told(timed_out(missing=[2]))
    assert message.startswith("rank 0 (host, pid 100): barrier() timed out after 2.0 s; rank 2 (host, pid 102) did not")
    assert "wait in" not in message and "took a different path through the program" in message


@pytest.mark.parametrize("name", [3, 5])
def test_a_rank_that_waits_is_named_with_what_it_waits_for(name):
    """A named rank may wait for a rank that is not in the group."""
    message = told(timed_out(missing=[2], waiting=[2], blocked_by=[name]))
    culprit = EVERYBODY[name]
    assert (
        f"rank 2 (host, pid 102) did not reach the call because it waits in another call, which is delayed by {culprit}"
        in message
    )
    assert f"Look at {culprit} first" in message and "stopped" in message


def test_ranks_that_wait_are_told_from_the_one_that_is_to_blame():
    message = told(timed_out(missing=[1, 2, 3], waiting=[1, 2]))
    assert (
        "; rank 3 (host, pid 103) did not reach the call; rank 1 (host, pid 101), rank 2 (host, pid 102) did not"
        in message
    )
    assert "because they wait in another call, which is delayed by rank 3 (host, pid 103)" in message
    assert "Look at rank 3 (host, pid 103) first" in message


def test_ranks_that_wait_for_each_other_are_told_so():
    message = told(timed_out(missing=[1], waiting=[1]))
    assert (
        "rank 1 (host, pid 101) did not reach the call because it waits in another call for ranks that are waiting too"
    ) in message
    assert "The ranks wait for each other" in message


def test_a_rank_that_was_missed_is_told_so_and_what_kept_it():
    late = told(timed_out(missing=[2, 3], waiting=[2]), 2)
    assert "on rank 0 (host, pid 100), which was waiting for this rank; rank 3 (host, pid 103) did not" in late
    assert "; this rank waited in another call, which is delayed by rank 3 (host, pid 103)" in late
    guilty = told(timed_out(missing=[2, 3], waiting=[2]), 3)
    assert (
        "rank 2 (host, pid 102) did not reach the call because it waits in another call, which is delayed by this rank"
    ) in guilty
    assert "Look at" not in guilty


def test_a_rank_that_came_and_was_stopped_is_named():
    message = told(timed_out(missing=[2], has_begun=True))
    assert "; rank 2 (host, pid 102) reached the call but did not complete it" in message


def test_a_rank_that_left_after_a_time_out_says_because_of_whom():
    left = CallFailure(OutcomeCode.PEER_LOST, missing=[2], gone=[2], left=[2], cause=5, cause_hung=True)
    error = to_error(left, EVERYBODY[:4], 0, "barrier()", engine_members=EVERYBODY)
    assert str(error).startswith("rank 2 (host, pid 102) left the group")
    assert "after a call had timed out because of rank 5 (host, pid 105)" in str(error)
    assert "Look first at rank 5 (host, pid 105)" in str(error)
    assert getattr(error, "rank", None) == 2
    died = told(dataclasses.replace(left, left=[]))
    assert died.startswith("rank 2 (host, pid 102) died") and "dmesg" in died
