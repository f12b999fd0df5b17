"""Timeouts given as a timedelta or in seconds."""

from __future__ import annotations

from datetime import timedelta

import pytest

from paceline.durations import to_seconds, whole_number


def test_a_timeout_is_a_timedelta_or_seconds():
    assert to_seconds(timedelta(seconds=2)) == to_seconds(2) == to_seconds(2.0) == 2
    with pytest.raises(TypeError, match="timeout is None; it must be a datetime.timedelta or a number of seconds"):
        to_seconds(None)
    with pytest.raises(ValueError, match="timeout is nan"):
        to_seconds(float("nan"))


@pytest.mark.parametrize("text", ["", " 1", "+1", "-1", "1_0", "1.0", "\u0663", "\u00b2", "9" * 5000])
def test_a_whole_number_consists_of_ascii_digits(text):
    assert whole_number(text) is None


def test_a_whole_number_is_in_a_range():
    assert (whole_number("007"), whole_number("0"), whole_number("9" * 18)) == (7, 0, 10**18 - 1)
    assert [whole_number(text, least=1, most=64) for text in ("0", "1", "64", "65")] == [None, 1, 64, None]
