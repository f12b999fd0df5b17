"""Calls that take longer than similar calls usually do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.operate.diagnosis.finding import Cause, Diagnosis
from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    RankCall,
    RankState,
    StoreWait,
)
from paceline.operate.diagnosis.stall_detector import (
    ActivityTracker,
    StallReporter,
    StallThreshold,
    overdue,
    overdue_since_s,
)

SUM = CallSignature("all_reduce", "float32", 4096, "SUM")


@pytest.mark.parametrize(
    ("usual_s", "limit_s"), [(0.001, 10.0), (1.9, 10.0), (2.5, 12.5), (3.0, 15.0), (60.0, 15.0), (None, 10.0)]
)
def test_the_limit_follows_what_such_calls_usually_take(usual_s, limit_s):
    assert StallThreshold().limit_s([] if usual_s is None else [usual_s] * 100) == limit_s


def rank_with(*durations_s, waiting_since_s):
    done = [RankCall("g", at, SUM, 0.0, duration_s, "ok") for at, duration_s in enumerate(durations_s)]
    return RankState(0, calls=(*done, RankCall("g", len(done), SUM, waiting_since_s)))


def test_a_call_is_overdue_only_by_the_measure_of_its_kind():
    assert overdue(rank_with(*[2.6] * 50, waiting_since_s=100.0), 112.9, StallThreshold()) is None
    assert overdue(rank_with(*[2.6] * 50, waiting_since_s=100.0), 113.1, StallThreshold()) is not None
    other = replace(SUM, count=1 << 20)
    mixed = RankState(
        0, calls=(*(RankCall("g", n, other, 0.0, 2.6, "ok") for n in range(50)), RankCall("g", 50, SUM, 100.0))
    )
    assert overdue(mixed, 110.1, StallThreshold()) is not None


def test_the_formation_of_the_first_group_may_take_longer():
    forming = RankCall("g", 0, CallSignature("new_group"), 100.0)
    first, later = RankState(0, calls=(forming,)), RankState(0, calls=(RankCall("f", 1, SUM, 0.0, 1.0, "ok"), forming))
    assert (overdue(first, 129.0, StallThreshold()), overdue(first, 131.0, StallThreshold())) == (None, forming)
    assert (overdue(later, 109.0, StallThreshold()), overdue(later, 111.0, StallThreshold())) == (None, forming)


def test_a_long_wait_for_a_store_is_overdue():
    rank = replace(rank_with(waiting_since_s=103.0), store_wait=StoreWait("get", "'ready'", 1, 100.0))
    assert overdue_since_s(rank, 112.0, StallThreshold()) is None
    assert overdue_since_s(rank, 114.0, StallThreshold()) == 103.0
    assert overdue_since_s(rank, 116.0, StallThreshold()) == 100.0


def test_a_recording_that_changes_is_not_quiet():
    pulse = ActivityTracker()
    for second in range(20):
        pulse.note_tick(0, 7, float(second))
        pulse.note_tick(1, second, float(second))
    assert pulse.quiet(19.0, 10.0) == [0]
    pulse.keep({1})
    assert pulse.quiet(40.0, 10.0) == [1]


def test_a_verdict_is_said_once_and_its_end_too():
    said, first = StallReporter(), Diagnosis(Cause.BUSY, (1,), "busy", is_fault=False)
    assert said.resumed(0.0) is None
    assert [said.report(first, 0.0), said.report(replace(first, sentence="later"), 0.0)] == ["busy", None]
    assert said.report(Diagnosis(Cause.STOPPED, (1,), "stopped"), 0.0) == "stopped"
    assert said.resumed(42.0) == "the job continues after 42 s"
    assert said.resumed(43.0) is None
