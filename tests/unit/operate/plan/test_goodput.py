"""The cost of failures: simulated with the real coordinator for elastic jobs, computed for other jobs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.operate.plan.goodput import (
    best_period_s,
    goodput,
    goodput_text,
    parse_failures,
    parse_times,
    share_with_restarts,
)
from paceline.operate.plan.simulated_job import DAY_S, HOUR_S, EventTimes, MeanTimesBetweenFailures

TIMES = EventTimes(step_s=0.5)


@given(st.floats(0.1, 100.0), st.floats(1e3, 1e7))
def test_no_other_period_loses_less_than_the_best(saving_s, between_s):
    best_s = best_period_s(saving_s, between_s)
    best = share_with_restarts(best_s, saving_s, 0.0, 1 / between_s)
    for other_s in (0.5 * best_s, 0.8 * best_s, 1.25 * best_s, 2.0 * best_s):
        assert share_with_restarts(other_s, saving_s, 0.0, 1 / between_s) <= best * 1.001


def test_shares_of_jobs_that_restart():
    assert share_with_restarts(100.0, 1.0, 60.0, 0.0) == pytest.approx(100 / 101)
    assert share_with_restarts(math.inf, 1.0, 60.0, 0.001) == 0.0
    rare = share_with_restarts(1000.0, 1.0, 60.0, 1e-7)
    assert rare == pytest.approx(1000 / 1001 * (1 - 1e-7 * (60 + 500)), rel=1e-5), "half a period and a restart"


def test_an_elastic_job_outlives_one_that_restarts():
    found = goodput(
        200, 8, TIMES, MeanTimesBetweenFailures(worker_s=90 * DAY_S, machine_s=30 * DAY_S, job_s=60 * DAY_S), jobs=2
    )
    assert 0.99 < found.elastic < 1 and found.restarting < found.elastic - 0.02
    assert found.restarting_period_s < found.elastic_period_s
    assert "are cut off, the other" in goodput_text([found], TIMES)


def test_times_between_failures_are_read():
    assert parse_failures("machine=30d, worker=12h") == MeanTimesBetweenFailures(12 * HOUR_S, 30 * DAY_S, 0.0)
    assert parse_times("repair=10min,slowness=1.5", TIMES) == replace(TIMES, repair_s=600.0, slowness=1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine=30", "'30' in 'machine=30' is not a duration"),
        ("disk=3d", "names worker, machine, job"),
        ("machine", "NAME=TIME"),
    ],
)
def test_wrong_times_between_failures_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_failures(text)


def test_impossible_times_are_refused():
    with pytest.raises(ValueError, match="slowness is 0.5"):
        goodput(2, 1, replace(TIMES, slowness=0.5), MeanTimesBetweenFailures())
