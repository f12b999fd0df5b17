"""Conclusions that a rank draws about the others after a failed call, from their reports and observed state."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from paceline.comm.engine.channel import NO_REDUCTION, CallFailure, HeaderFields, OutcomeCode
from paceline.comm.engine.failures import ProcessIdentity, RankIdentity, to_error
from paceline.comm.record.layout import DTYPES
from paceline.comm.schedule.steps import Operation

ELSEWHERE = ProcessIdentity("another boot/1/2", 4321, 99)


def process_of(pid: int) -> ProcessIdentity:
    with open(f"/proc/{pid}/stat") as stat:
        return dataclasses.replace(
            ProcessIdentity.mine(), pid=pid, started=int(stat.read().rpartition(")")[2].split()[19])
        )


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def test_a_process_that_runs_has_not_ended(child):
    assert ProcessIdentity.mine().has_ended() is False
    assert process_of(child.pid).has_ended() is False


def test_a_process_has_ended_even_if_nobody_has_waited_for_it(child):
    process = process_of(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.has_ended() is True
    child.wait()
    assert process.has_ended() is True


def test_a_later_process_of_the_same_number_is_another_one():
    mine = ProcessIdentity.mine()
    assert dataclasses.replace(mine, started=mine.started - 1).has_ended() is True


def test_a_process_of_another_namespace_is_not_judged():
    assert ELSEWHERE.has_ended() is None


def test_a_mismatch_shows_the_calls_that_differ():
    members = [RankIdentity(rank, "here", 100 + rank) for rank in range(3)]
    roots = [(93, Operation.BROADCAST, DTYPES.index("float32"), NO_REDUCTION, root, 4) for root in range(2)]
    later = (94, Operation.BARRIER, 0, NO_REDUCTION, -1, 0)

    def message(*calls: HeaderFields) -> str:
        outcome = CallFailure(OutcomeCode.MISMATCH, reporter=0, calls=calls, algorithms=[0] * 3)
        return str(to_error(outcome, members, 0, "barrier()"))

    of_roots = message(*roots, later)
    assert "root 0) as call 93; rank 1 (here, pid 101) called broadcast(float32, 4 elements, root 1)" in of_roots
    assert "barrier" not in of_roots
    of_two = message(roots[0], later, (0, 0, 0, 0, -1, 0))  # their numbers differ, so both are shown
    assert "root 0) as call 93; rank 1 (here, pid 101) called barrier() as call 94" in of_two
    assert "rank 2" not in of_two
