"""Calls that wait for ranks: cycles among such calls, and the ranks for which all others ultimately wait."""

from __future__ import annotations

from paceline.operate.diagnosis.job_snapshot import CallSignature, RankCall
from paceline.operate.diagnosis.wait_graph import CallWait, find_deadlock, roots


def wait(group: str, waiters: tuple[int, ...], absent: tuple[int, ...]) -> CallWait:
    call = RankCall(group, 1, CallSignature("barrier"), 0.0)
    return CallWait(call, waiters, absent, (), 0.0, 0.0, len(waiters) + len(absent))


ONE, TWO, THREE = wait("a", (0,), (1,)), wait("b", (1,), (2,)), wait("c", (2,), (0,))


def test_calls_that_wait_for_each_other_are_a_deadlock():
    assert find_deadlock([ONE, TWO, THREE], {}) == [ONE, TWO, THREE]
    assert find_deadlock([ONE, TWO], {}) == []


def test_a_rank_that_is_not_blocked_can_still_arrive():
    assert find_deadlock([ONE, TWO, THREE], {1: False}) == []


def test_the_shortest_cycle_is_returned():
    back = wait("d", (1,), (0,))
    assert find_deadlock([ONE, TWO, THREE, back], {}) == [ONE, back]


def test_a_root_is_awaited_and_does_not_wait():
    assert roots([ONE, TWO], {}) == [2]
    assert roots([ONE, TWO, wait("e", (0,), (2, 3))], {}) == [2, 3]
    assert roots([ONE, TWO, THREE], {}) == []


def test_a_call_is_complete_once_nobody_is_absent():
    assert wait("a", (0, 1), ()).is_complete
    assert not ONE.is_complete
