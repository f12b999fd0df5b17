"""Curves and text that the dashboard keeps."""

from __future__ import annotations

from paceline.operate.dashboard.dashboard_state import DownsampledCurve, Tail, about


def test_long_curves_keep_their_spikes():
    curve = DownsampledCurve(most=64)
    from paceline.operate.dashboard.dashboard_state import Point

    for step in range(10_000):
        value = 50.0 if step == 1234 else 1.0
        curve.add(Point("loss", step, value, value, value))
    assert len(curve.points) < 64
    assert max(point.high for point in curve.points) == 50.0
    assert curve.points[-1].step > 9_000


def test_a_tail_forgets_its_beginning():
    tail: Tail[int] = Tail(3)
    tail.extend(range(5))
    assert (tail.latest().items, tail.latest().first, tail.latest().end) == ((2, 3, 4), 2, 5)
    assert tail.latest() is tail.latest()


def test_lengths_of_time_are_in_two_units_at_most():
    assert [about(seconds) for seconds in (0.2, 45, 3599, 3600, 7260, 100 * 3600)] == [
        "less than 1 s", "45 s", "1 h", "1 h", "2 h 1 min", "4 d 4 h",
    ]  # fmt: skip
