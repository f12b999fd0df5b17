"""The cost of failures: elastic jobs are simulated with the real coordinator, others are computed."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planned import calibration

from paceline.cli.main import main
from paceline.operate.plan.calibration import encode
from paceline.operate.plan.goodput import (
    best_period_s,
    goodput,
    goodput_text,
    parse_failures,
    parse_times,
    partition,
    play,
    share_with_restarts,
)
from paceline.operate.plan.simulated_job import DAY_S, HOUR_S, EventTimes, MeanTimesBetweenFailures, SimulatedJob

TIMES = EventTimes(step_s=0.5)
MEETING_S = TIMES.forming_s + TIMES.meeting_s
TOLD_S = 2 * TIMES.message_s  # the coordinator detects it and announces a view


def test_a_death_costs_the_meeting_and_the_dead_workers_share():
    played = SimulatedJob(4, 1, TIMES, MeanTimesBetweenFailures(worker_s=4 * HOUR_S, machine_s=0.0), 1).play(10)
    assert len(played.pauses_s) == 10 and not played.end
    redone_s = 0.5 * (1 / 4) / (1 - 1 / 4)
    assert sorted(played.pauses_s)[5] == pytest.approx(redone_s + TOLD_S + MEETING_S, abs=1e-6)
    assert min(played.pauses_s) >= 0


def test_a_survivor_that_is_alone_has_nobody_to_meet():
    played = SimulatedJob(2, 1, TIMES, MeanTimesBetweenFailures(worker_s=4 * HOUR_S, machine_s=0.0), 1).play(10)
    assert sorted(played.pauses_s)[5] == pytest.approx(0.5 + TOLD_S + TIMES.forming_s, abs=1e-6)


def test_a_lost_machine_is_waited_for_until_it_is_given_up():
    played = SimulatedJob(4, 2, TIMES, MeanTimesBetweenFailures(machine_s=DAY_S), 3).play(5)
    redone_s = 0.5 * (1 / 4) / (1 - 1 / 4)
    waited_s = TIMES.silence_s + TIMES.message_s + MEETING_S
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


@example(1045, 3, 1)  # the end was drawn for a moment at which the last failure was not over
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


def test_the_command_says_what_failures_cost(tmp_path, capsys):
    path = tmp_path / "calibration.json"
    path.write_bytes(encode(calibration()))
    words = ["plan", str(path), "--nodes", "2,4", "--failures", "machine=30d,worker=90d"]
    assert main(words) == 0
    assert "If 1 of 4 nodes is cut off, the other 3 continue after" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["failures"]
    assert [each["nodes"] for each in facts] == [2, 4] and all(0.9 < each["elastic_share"] <= 1 for each in facts)
    assert main([*words[:-1], "machine=never"]) == 2
    assert "is not a duration" in capsys.readouterr().err
