"""Timeouts as timedelta or seconds."""

from __future__ import annotations

from datetime import timedelta

import pytest

from paceline.durations import to_seconds


def test_a_timeout_is_a_timedelta_or_seconds():
    assert to_seconds(timedelta(seconds=2)) == to_seconds(2) == to_seconds(2.0) == 2
    with pytest.raises(TypeError, match="timeout is None; it must be a datetime.timedelta or a number of seconds"):
        to_seconds(None)
    with pytest.raises(ValueError, match="timeout is nan"):
        to_seconds(float("nan"))
