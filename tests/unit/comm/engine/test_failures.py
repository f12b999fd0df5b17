"""Conclusions that a rank draws about the others after a failed call, from their reports and observed state."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from paceline.comm.engine.failures import ProcessIdentity

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
