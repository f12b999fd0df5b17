"""Detection of ranks that are slower than chance can explain, from steps and from arrivals, with different clocks."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.operate.diagnosis.clock_offset import aligned, shifted
from paceline.operate.diagnosis.finding import Cause
from paceline.operate.diagnosis.job_snapshot import CallSignature, RankCall, RankState
from paceline.operate.diagnosis.stragglers import (
    MOST_PROBABLE,
    StepWork,
    describe,
    find_stragglers,
    probability_of_sum,
    slow_ranks,
    without_stalls,
    work_before_calls,
)

SUM = CallSignature("all_reduce", "float32", 4096, "SUM")
CALL_S = 0.003

NOISES = {
    "uniform": lambda chance: chance.random(),
    "narrow": lambda chance: math.exp(chance.gauss(0, 0.05)),
    "wide": lambda chance: math.exp(chance.gauss(0, 0.5)),
    "Pareto without a variance": lambda chance: 1 + 0.1 * chance.paretovariate(1.5),
    "Pareto, almost without a mean": lambda chance: chance.paretovariate(1.1),
    "rare long pauses": lambda chance: (
        math.exp(chance.gauss(0, 0.03)) + (chance.random() < 0.03) * chance.paretovariate(1.2)
    ),
}
"""Healthy step times, most of them with heavy tails."""


def steps_of(own_s):
    """Returns steps with one call each. Every step takes as long as the work of the slowest rank."""
    return [StepWork(number, max(row) + CALL_S, dict(enumerate(row))) for number, row in enumerate(own_s)]


def healthy(chance, noise, ranks, steps):
    return [[0.1 * NOISES[noise](chance) for _ in range(ranks)] for _ in range(steps)]


def accused(own_s):
    return [straggler.rank for cost in find_stragglers(steps_of(own_s)) for straggler in cost.stragglers]


def require_no_false_stragglers(jobs: int, sizes=(2, 3, 4, 8, 16, 32, 64)) -> None:
    chance = random.Random(1)
    for number in range(jobs):
        noise = list(NOISES)[number % len(NOISES)]
        ranks, steps = chance.choice(sizes), chance.choice((100, 200, 300))
        assert accused(healthy(chance, noise, ranks, steps)) == [], (
            f"job {number}: {ranks} ranks, {steps} steps, {noise}"
        )


def test_no_rank_of_a_healthy_job_is_accused():
    require_no_false_stragglers(60, sizes=(2, 3, 4, 8))


@pytest.mark.soak
def test_no_rank_of_500_healthy_jobs_is_accused():
    require_no_false_stragglers(500)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("noise", ["narrow", "Pareto without a variance", "rare long pauses"])
def test_a_core_ten_percent_slower_is_found_within_300_steps(ranks, noise):
    own_s = healthy(random.Random(2), noise, ranks, 300)
    for row in own_s:
        row[1] *= 1.1
    (cost,) = find_stragglers(steps_of(own_s))
    (slow,) = cost.stragglers
    assert (slow.rank, slow.cause, slow.long_steps) == (1, Cause.SLOW_CORE, None)
    assert slow.excess_s == pytest.approx(0.01 * (1.1 if noise.startswith("Pareto") else 1.0), rel=0.35)
    assert slow.probability <= MOST_PROBABLE


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_rank_with_every_tenth_batch_long_is_called_that(ranks):
    own_s = healthy(random.Random(3), "narrow", ranks, 300)
    for row in own_s[4::10]:
        row[1] *= 2.5
    (cost,) = find_stragglers(steps_of(own_s))
    (slow,) = cost.stragglers
    assert (slow.rank, slow.cause, slow.long_steps, slow.period) == (1, Cause.LONG_STEPS, 30, 10)
    (told,) = describe(cost)
    assert told.sentence.startswith("in every 10th step, rank 1 takes 1")


def test_neither_a_pause_nor_a_shared_core_makes_a_straggler():
    own_s = healthy(random.Random(4), "narrow", 3, 300)
    own_s[150][1] += 60.0
    assert accused(own_s) == [], "a single pause, however long"
    for row in own_s[100:160]:
        row[2] *= 1.6
    assert accused(own_s) == [], "a core that is shared for a while"


def test_few_steps_are_no_evidence():
    assert accused([[0.1, 0.2]] * 99) == []
    for steps in range(100, 340, 7):
        assert accused([[0.1, 0.2]] * steps) == [1]


def test_differences_too_small_to_matter_are_not_told():
    assert accused([[0.1, 0.102, 0.1]] * 300) == []


def test_each_further_look_needs_more_evidence():
    own_s = [[0.1, 0.2]] * 100
    probabilities = [find_stragglers(steps_of(own_s), looks)[0].stragglers[0].probability for looks in (1, 2, 3)]
    assert probabilities == pytest.approx([probabilities[0] * factor for factor in (1, 3, 6)])


def test_ranks_that_are_equally_slow_do_not_hide_each_other():
    own_s = healthy(random.Random(5), "narrow", 6, 200)
    for row in own_s:
        row[1] *= 1.5
        row[4] *= 1.5
    (cost,) = find_stragglers(steps_of(own_s))
    assert sorted(each.rank for each in cost.stragglers) == [1, 4]
    assert cost.without_s == pytest.approx(0.113, rel=0.05)
    last = describe(cost)[-1].sentence
    assert "if ranks 1, 4 were like the others, a step would take 11" in last


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 5), st.integers(0, 1 << 30))
def test_the_bound_is_never_below_the_probability(ranks, seed):
    """With one constant value per step, the probability is binomial and therefore known."""
    chance = random.Random(seed)
    last = [0 if chance.random() < 0.7 else chance.randrange(ranks) for _ in range(40)]
    values = [[float(rank == each) for rank in range(ranks)] for each in last]
    count = last.count(0)
    exact = sum(math.comb(40, k) * (ranks - 1) ** (40 - k) for k in range(count, 41)) / ranks**40
    assert probability_of_sum(values, 0) >= exact


def test_what_a_step_takes_is_told_without_stalls():
    durations_s = [0.2] * 90 + [0.5] * 10 + [16.0]
    assert without_stalls(durations_s) == [True] * 100 + [False], "every tenth step may be long"
    own_s = [[0.1, 0.2]] * 100 + [[0.1, 16.0]] + [[0.1, 0.2]] * 100
    (cost,) = find_stragglers(steps_of(own_s))
    assert (cost.step_s, cost.without_s) == (pytest.approx(0.203), pytest.approx(0.103))


def job(work_s, steps=150):
    """Returns ranks whose n-th step takes `work_s[rank][n % len]` seconds and ends with a reduction."""
    begins_s, calls = 0.0, [[] for _ in work_s]
    for step in range(steps):
        arrivals_s = [begins_s + own[step % len(own)] for own in work_s]
        begins_s = max(arrivals_s) + CALL_S
        for own, arrived_s in zip(calls, arrivals_s, strict=True):
            own.append(RankCall("g", step + 1, SUM, arrived_s, begins_s, "ok", step + 1))
    return [RankState(rank, calls=tuple(own)) for rank, own in enumerate(calls)]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 6), st.data(), st.floats(1.3, 5.0))
def test_a_slow_rank_is_named_with_what_it_cost(size, data, factor):
    slow = data.draw(st.integers(0, size - 1))
    ranks = job([[0.1 * factor] if rank == slow else [0.1] for rank in range(size)])
    (cost,) = find_stragglers(work_before_calls(ranks))
    (found,) = cost.stragglers
    assert (found.rank, found.cause) == (slow, Cause.SLOW_CORE)
    assert found.excess_s == pytest.approx(0.1 * (factor - 1))
    assert cost.step_s == pytest.approx(0.1 * factor + CALL_S)
    assert cost.without_s == pytest.approx(0.1 + CALL_S)
    (told,) = slow_ranks(ranks)
    assert (told.cause, told.blamed) == (Cause.SLOW_CORE, (slow,))
    others = "the other" if size == 2 else "the others"
    assert f"if rank {slow} had been like {others}, a step would have taken 103 ms instead of" in told.sentence
    assert "149 steps, confidence 99.9999%" in told.sentence


def test_calls_before_the_first_step_are_left_out():
    ranks = [
        replace(rank, calls=(replace(rank.calls[0], group="h", step=None), *rank.calls)) for rank in job([[0.1], [0.2]])
    ]
    assert {step.is_step for step in work_before_calls(ranks)} == {True}


def test_a_program_without_steps_is_told_in_iterations():
    """A short call follows each sum; every tenth iteration contains a second short call."""
    header = {0: SUM, 1: CallSignature("broadcast", "float32", 8, root=0), 2: CallSignature("barrier")}
    ranks = []
    for rank in job([[0.1], [0.2]], steps=120):
        calls = [
            replace(call, sequence=4 * call.sequence + part, step=None, header=header[part],
                    arrived_s=call.arrived_s if part == 0 else call.ended_s + 0.0001 * part,
                    ended_s=call.ended_s + 0.0001 * part + 0.00005)
            for call in rank.calls
            for part in range(3 if call.sequence % 10 == 0 else 2)
        ]  # fmt: skip
        ranks.append(replace(rank, calls=tuple(calls)))
    (told,) = slow_ranks(ranks)
    assert told.cause is Cause.SLOW_CORE
    assert told.sentence.startswith("rank 1 needed 100 ms more than the other rank for its own work in a typical iter")
    assert "had been like the other, an iteration would have taken 103 ms instead of 203 ms" in told.sentence


def job_on_devices(work_s, enqueued_s, steps=150):
    """Returns ranks that enqueue a step's call after `enqueued_s[rank]`; devices reach it after `work_s[rank]`."""
    begins_s, calls = 0.0, [[] for _ in work_s]
    for step in range(steps):
        reached_s = [begins_s + max(own) for own in zip(work_s, enqueued_s, strict=True)]
        ended_s = max(reached_s) + CALL_S
        for own, late_s, ready_s in zip(calls, enqueued_s, reached_s, strict=True):
            call = RankCall("g", step + 1, SUM, begins_s + late_s, ended_s, "ok", step + 1)
            own.append(replace(call, device="cuda", reached_s=ready_s))
        begins_s = ended_s
    return [RankState(rank, calls=tuple(own)) for rank, own in enumerate(calls)]


def test_a_slow_device_is_told_from_a_program_that_is_late():
    (slow,) = slow_ranks(job_on_devices([0.1, 0.2, 0.1], [0.01, 0.01, 0.01]))
    assert (slow.blamed, slow.cause) == ((1,), Cause.SLOW_DEVICE)
    assert "its device computed more slowly" in slow.sentence
    (late,) = slow_ranks(job_on_devices([0.1, 0.1, 0.1], [0.01, 0.01, 0.2]))
    assert (late.blamed, late.cause) == ((2,), Cause.SLOW_CORE)
    ahead = job_on_devices([0.1, 0.101, 0.1], [0.01, 0.09, 0.01])
    assert slow_ranks(ahead) == [], "a program that is late, but earlier than its device, delays nobody"


def test_a_rank_that_waits_for_data_is_told_from_a_slow_one():
    ranks = job([[0.1], [0.1], [0.2]])
    ranks[2] = replace(ranks[2], data_s=13.5)
    (told,) = slow_ranks(ranks)
    assert told.cause is Cause.LOADER and "waited longer for its data" in told.sentence


def test_a_delay_before_several_calls_counts_once():
    """Rank 1 is 0.1 s late for three calls that it starts together in each step, like gradient buckets."""
    calls = {0: [], 1: []}
    for step in range(1, 121):
        for bucket in range(3):
            for rank, late_s in ((0, 0.0), (1, 0.1)):
                arrived_s = step + late_s + 0.001 * bucket
                calls[rank].append(RankCall("g", 3 * step + bucket, SUM, arrived_s, step + 0.3, "ok", step))
    work = work_before_calls([RankState(rank, calls=tuple(own)) for rank, own in calls.items()])
    assert [step.own_s[1] - step.own_s[0] for step in work] == pytest.approx([0.1] * 119)


@settings(max_examples=examples(30), deadline=None)
@given(st.floats(-1e5, 1e5))
def test_clocks_are_aligned_by_calls_that_end_together(offset_s):
    first, second = job([[0.1], [0.2]], steps=50)
    moved = aligned([first, shifted(second, offset_s)], ["a", "b"])
    assert [call.arrived_s for call in moved[1].calls] == pytest.approx([call.arrived_s for call in second.calls])
    assert moved[0] is first
