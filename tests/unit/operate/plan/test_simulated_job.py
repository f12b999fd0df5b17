"""Simulated jobs, including failures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.operate.plan.goodput import (
    goodput,
    partition,
    play,
)
from paceline.operate.plan.simulated_job import DAY_S, HOUR_S, EventTimes, MeanTimesBetweenFailures, SimulatedJob

TIMES = EventTimes(step_s=0.5)

RENDEZVOUS_S = TIMES.forming_s + TIMES.rendezvous_s

TOLD_S = 2 * TIMES.message_s  # the coordinator detects it and announces a view


def test_a_death_costs_the_rendezvous_and_the_dead_workers_share():
    played = SimulatedJob(4, 1, TIMES, MeanTimesBetweenFailures(worker_s=4 * HOUR_S, machine_s=0.0), 1).play(10)
    assert len(played.pauses_s) == 10 and not played.end
    redone_s = 0.5 * (1 / 4) / (1 - 1 / 4)
    assert sorted(played.pauses_s)[5] == pytest.approx(redone_s + TOLD_S + RENDEZVOUS_S, abs=1e-6)
    assert min(played.pauses_s) >= 0


def test_a_survivor_that_is_alone_has_nobody_to_meet():
    played = SimulatedJob(2, 1, TIMES, MeanTimesBetweenFailures(worker_s=4 * HOUR_S, machine_s=0.0), 1).play(10)
    assert sorted(played.pauses_s)[5] == pytest.approx(0.5 + TOLD_S + TIMES.forming_s, abs=1e-6)


def test_a_lost_machine_is_waited_for_until_it_is_given_up():
    played = SimulatedJob(4, 2, TIMES, MeanTimesBetweenFailures(machine_s=DAY_S), 3).play(5)
    redone_s = 0.5 * (1 / 4) / (1 - 1 / 4)
    waited_s = TIMES.silence_s + TIMES.message_s + RENDEZVOUS_S
    assert sorted(played.pauses_s)[2] == pytest.approx(redone_s + waited_s, abs=1e-6)


def test_without_a_machine_the_others_do_its_work():
    few = SimulatedJob(2, 1, replace(TIMES, repair_s=1e6), MeanTimesBetweenFailures(machine_s=DAY_S), 0).play(1)
    both = SimulatedJob(2, 1, replace(TIMES, repair_s=1.0), MeanTimesBetweenFailures(machine_s=DAY_S), 0).play(1)
    assert few.seconds == both.seconds, "the second failure comes at the same time"
    assert few.steps < both.steps


def test_a_job_without_failures_only_makes_steps():
    found = goodput(8, 4, TIMES, MeanTimesBetweenFailures(machine_s=0.0))
    assert (found.elastic, found.restarting, found.failures_per_day) == (1.0, 1.0, 0.0)
    assert math.isinf(found.elastic_period_s) and math.isinf(found.restarting_period_s)


def test_a_job_is_played_alike_from_the_same_seed():
    failures = MeanTimesBetweenFailures(worker_s=DAY_S, machine_s=DAY_S)
    assert play(40, 8, TIMES, failures, 5, 20) == play(40, 8, TIMES, failures, 5, 20)
    assert play(40, 8, TIMES, failures, 5, 20) != play(40, 8, TIMES, failures, 6, 20)


@example(1045, 3, 1)  # the job's end was drawn while a failure was still being handled
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 2))
def test_every_failure_is_survived_or_explained(seed, machines, per_machine):
    played = SimulatedJob(
        machines, per_machine, TIMES, MeanTimesBetweenFailures(worker_s=2 * HOUR_S, machine_s=4 * HOUR_S), seed
    ).play(12)
    assert played.end or len(played.pauses_s) == 12
    assert all(pause_s > -1e-6 for pause_s in played.pauses_s)
    assert played.steps <= played.seconds / TIMES.step_s + 2


@pytest.mark.parametrize("away", [1, 3, 5])
def test_the_larger_side_of_a_partition_goes_on(away):
    played = partition(10, away, TIMES)
    assert len(played.pauses_s) == 1 and TIMES.silence_s < played.pauses_s[0] < TIMES.silence_s + 1


def test_the_smaller_side_of_a_partition_stands_and_says_why():
    played = partition(10, 6, TIMES)
    assert not played.pauses_s and "cannot be reached" in played.end
