"""Who waited for whom, by when each rank came; and clocks that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.operate.diagnosis.clock_offset import aligned, shifted
from paceline.operate.diagnosis.finding import Cause
from paceline.operate.diagnosis.job_snapshot import CallSignature, RankCall, RankState
from paceline.operate.diagnosis.stragglers import describe, stragglers, worth_telling

SUM = CallSignature("all_reduce", "float32", 4096, "SUM")
CALL_S = 0.001


def job(work_s, steps=50):
    """Ranks whose n-th step takes `work_s[rank][n % len]` seconds, and then all of them reduce."""
    begins_s, calls = 0.0, [[] for _ in work_s]
    for step in range(steps):
        arrivals_s = [begins_s + own[step % len(own)] for own in work_s]
        begins_s = max(arrivals_s) + CALL_S
        for own, arrived_s in zip(calls, arrivals_s, strict=True):
            own.append(RankCall("g", step + 1, SUM, arrived_s, begins_s, "ok", step + 1))
    return [RankState(rank, calls=tuple(own)) for rank, own in enumerate(calls)]


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(2, 6), st.data(), st.floats(1.3, 5.0))
def test_a_slow_rank_is_named_with_what_it_cost(size, data, factor):
    slow = data.draw(st.integers(0, size - 1))
    ranks = job([[0.1 * factor] if rank == slow else [0.1] for rank in range(size)])
    found = stragglers(ranks)[0]
    assert found.rank == slow
    assert found.cost_s == pytest.approx(50 * 0.1 * (factor - 1))
    assert found.waited_s == pytest.approx({rank: found.cost_s for rank in range(size) if rank != slow})
    verdict = describe(found)
    assert (verdict.cause, verdict.blamed) == (Cause.SLOW_CORE, (slow,))
    assert f"a step would take {1e3 * (found.span_s - found.cost_s) / 50:.0f} ms" in verdict.sentence


def job_on_devices(work_s, enqueued_s, steps=50):
    """Ranks that make the call of a step after `enqueued_s[rank]`, and whose devices reach it after `work_s[rank]`."""
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
    slow = stragglers(job_on_devices([0.1, 0.2, 0.1], [0.01, 0.01, 0.01]))[0]
    assert (slow.rank, describe(slow).cause) == (1, Cause.SLOW_DEVICE)
    assert slow.cost_s == pytest.approx(50 * 0.1) and "its device computes more slowly" in describe(slow).sentence
    late = stragglers(job_on_devices([0.1, 0.1, 0.1], [0.01, 0.01, 0.2]))[0]
    assert (late.rank, describe(late).cause) == (2, Cause.SLOW_CORE)
    assert late.cost_s == pytest.approx(50 * 0.1)
    ahead = job_on_devices([0.1, 0.101, 0.1], [0.01, 0.09, 0.01])
    assert worth_telling(ahead) == [], "a program that is late, but earlier than its device, delays nobody"


def test_equal_ranks_are_not_worth_a_word():
    assert worth_telling(job([[0.1, 0.101], [0.101, 0.1]])) == []


def test_a_single_long_pause_makes_no_straggler():
    assert worth_telling(job([[0.1] * 49 + [60.0], [0.1]])) == []


def test_a_rank_that_waits_for_data_is_told_from_a_slow_one():
    ranks = job([[0.1], [0.1], [0.2]])
    ranks[2] = replace(ranks[2], data_s=4.5)
    assert describe(stragglers(ranks)[0]).cause is Cause.LOADER


def test_a_delay_before_several_calls_counts_once():
    """Rank 1 comes 0.1 s late to three calls that it makes at once, in each step, as for buckets of gradients."""
    calls = {0: [], 1: []}
    for step in range(20):
        for bucket in range(3):
            for rank, late_s in ((0, 0.0), (1, 0.1)):
                arrived_s = step + late_s + 0.001 * bucket
                calls[rank].append(RankCall("g", 3 * step + bucket, SUM, arrived_s, step + 0.3, "ok", step))
    found = stragglers([RankState(rank, calls=tuple(own)) for rank, own in calls.items()])[0]
    assert found.rank == 1
    assert found.cost_s == pytest.approx(20 * 0.1)


@settings(max_examples=examples(30), deadline=None)
@given(st.floats(-1e5, 1e5))
def test_clocks_are_aligned_by_calls_that_end_together(offset_s):
    first, second = job([[0.1], [0.2]])
    moved = aligned([first, shifted(second, offset_s)], ["a", "b"])
    assert [call.arrived_s for call in moved[1].calls] == pytest.approx([call.arrived_s for call in second.calls])
    assert moved[0] is first
