"""The wording of a diagnosis: ranks, durations and verbs."""

from __future__ import annotations

import pytest

from paceline.operate.diagnosis.finding import Cause, lasting, milliseconds, named, verb


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 0], "ranks 0, 1"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 4, 4], "ranks 0, 2-4")],
)
def test_ranks_are_named_by_runs(ranks, text):
    assert named(ranks) == text
    assert named(ranks, "slot") == text.replace("rank", "slot")


def test_of_many_ranks_some_are_named():
    assert named(range(0, 100, 2)).endswith(" more")


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0.0 s"), (0.34, "0.3 s"), (14.2, "14 s"), (180, "3 min"), (9000, "2.5 h")]
)
def test_a_duration_has_the_unit_that_fits(seconds, text):
    assert lasting(seconds) == text


def test_milliseconds_have_three_digits():
    assert [milliseconds(value) for value in (174.2, 17.42, 1.742, 2500.0)] == ["174 ms", "17.4 ms", "1.74 ms", "2.5 s"]


def test_a_verb_agrees_with_the_number():
    assert [verb(1, "wait"), verb(2, "wait"), verb(1, "are"), verb(2, "have")] == ["waits", "wait", "is", "have"]


def test_causes_have_different_texts():
    assert len({cause.value for cause in Cause}) == len(Cause)
