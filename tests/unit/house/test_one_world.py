"""Programs that share a world are reported individually."""

from __future__ import annotations

import pytest
from one_world import merged, require, run_in_turn


def fail() -> None:
    raise ValueError("told to fail")


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    return merged([{"first": "", "second": ""}, run_in_turn({"first": int, "second": fail, "third": int})])


def test_a_program_before_the_failure_passes(reports):
    require(reports, "first")


def test_a_program_that_fails_on_one_rank_fails(reports):
    with pytest.raises(AssertionError, match=r"rank 1:(?s:.*)ValueError: told to fail"):
        require(reports, "second")


def test_a_program_behind_the_failure_was_not_reached(reports):
    with pytest.raises(AssertionError, match="not reached: second failed before"):
        require(reports, "third")
