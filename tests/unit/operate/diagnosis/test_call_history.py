"""Comparison of several ranks' calls: predictions, and steps with too few or too many calls."""

from __future__ import annotations

from paceline.operate.diagnosis.call_history import (
    MismatchKind,
    call_count_mismatch,
    difference,
    match_calls,
    predicted,
    span_of,
)
from paceline.operate.diagnosis.job_snapshot import CallSignature, RankCall, RankState

A, B, C = (CallSignature("all_reduce", "float32", count) for count in (1, 2, 3))


def call(sequence: int, header: CallSignature = A, step: int | None = None, at_s: float = 0.0) -> RankCall:
    return RankCall("g", sequence, header, at_s, at_s + 1, "ok", step)


def test_the_next_calls_are_those_of_the_longest_match():
    assert predicted([A, B, C, A, B], 4) == [C, A, B, C]
    assert predicted([A, B, C]) == []


def test_the_first_call_that_differs_is_found():
    same = [call(1), call(2, B)]
    assert difference({0: same, 1: same}) is None
    assert difference({0: same}) is None
    found = difference({0: [call(1), call(2, B)], 1: [call(1), call(2, C)]})
    assert found is not None and found.sequence == 2


def test_a_call_that_followed_the_same_call_before_is_expected():
    past = [B, A, A, A, C, C, A]  # C is predicted, but neither rank calls it
    one, other = [[*past, last] for last in (A, B)]
    calls = {
        rank: [call(number, header) for number, header in enumerate(own, 1)] for rank, own in enumerate((one, other))
    }
    found = difference(calls)
    assert found is not None
    assert (found.deviating, found.expected, found.is_guess) == ((1,), A, False)


def test_a_call_made_once_before_need_not_be_right():
    past = [C, A, B]  # C is a first barrier, for example
    other = CallSignature("broadcast", "float32", 4)
    calls = {rank: [call(number, header) for number, header in enumerate([*past, last], 1)]
             for rank, last in enumerate((other, C))}  # fmt: skip
    found = difference(calls)
    assert found is not None
    assert (found.deviating, found.is_guess) == ((0, 1), True)


def steps(*counts: int) -> list[RankCall]:
    numbers = [step for step, count in enumerate(counts) for _ in range(count)]
    return [call(sequence, step=step) for sequence, step in enumerate(numbers, 1)]


def test_a_step_with_a_call_too_few_is_found():
    found = call_count_mismatch({0: steps(2, 2, 2, 2), 1: steps(2, 2, 1, 2), 2: steps(2, 2, 2, 2)})
    assert found is not None
    assert (found.rank, found.step, found.made, found.usual, found.kind) == (1, 2, 1, 2, MismatchKind.SKIPPED)


def test_of_two_ranks_the_one_with_an_unusual_step_is_found():
    found = call_count_mismatch({0: steps(2, 2, 2, 2, 2), 1: steps(2, 2, 3, 2, 2)})
    assert found is not None
    assert (found.rank, found.kind) == (1, MismatchKind.TWICE)


def test_incomplete_steps_are_not_compared():
    assert call_count_mismatch({0: steps(1, 2, 2, 2), 1: steps(2, 2, 2, 1)}) is None


def test_calls_are_matched_in_the_order_of_their_ends():
    one = RankState(0, calls=(call(1, at_s=5.0), call(2, at_s=2.0), call(3)))
    other = RankState(1, calls=(call(1, at_s=4.0), call(2, at_s=3.0)))
    matched = match_calls([one, other])
    assert [next(iter(each.values())).sequence for each in matched] == [2, 1]
    assert span_of(matched) == 4.0
    assert span_of([]) == 0.0
