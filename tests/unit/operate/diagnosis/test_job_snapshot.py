"""Snapshots of a job: descriptions of calls, and idle ranks."""

from __future__ import annotations

from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    ProcessActivity,
    ProcessState,
    RankCall,
    RankState,
    is_idle,
)


def test_a_call_is_shown_with_the_arguments_that_matter():
    assert str(CallSignature("all_reduce", "float32", 4096, "SUM")) == "all_reduce(float32, 4096)"
    assert str(CallSignature("broadcast", "int64", 3, root=2)) == "broadcast(int64, 3, root 2)"
    assert str(RankCall("g", 7, CallSignature("barrier"), 0.0)) == "barrier() call 7"


def test_a_call_is_ready_once_its_device_has_reached_it():
    header = CallSignature("all_reduce", "float32", 1)
    assert RankCall("g", 1, header, 2.0).ready_s == 2.0
    assert RankCall("g", 1, header, 2.0, device="cuda", reached_s=5.0).ready_s == 5.0


def test_a_call_that_failed_stays_open():
    header = CallSignature("all_reduce", "float32", 1)
    opened = [RankCall("g", 1, header, 0.0, *end).is_open for end in ((), (1.0, "ok"), (1.0, "timeout"))]
    assert opened == [True, False, True]


def test_a_rank_is_idle_between_calls_and_without_work():
    done = RankCall("g", 1, CallSignature("barrier"), 0.0, 1.0, "ok")
    idle = ProcessActivity(ProcessState.SLEEPS)
    assert is_idle(RankState(0, calls=(done,), process=idle))
    assert not is_idle(RankState(0, process=idle))
    assert not is_idle(RankState(0, calls=(done,)))
    assert not is_idle(RankState(0, calls=(RankCall("g", 2, CallSignature("barrier"), 0.0),), process=idle))
