"""Workers that have been stopped for a long time."""

from __future__ import annotations

from paceline.operate.launch.elastic.worker_pool import STOPPED_AFTER_S, StoppedProcesses


def test_who_is_stopped_for_long_is_frozen():
    watch = StoppedProcesses()
    assert watch.deadline_s is None
    watch.look([7], 10.0)
    watch.look([7, 8], 10.5)
    assert watch.deadline_s == 10.0 + STOPPED_AFTER_S
    assert watch.frozen(10.9) == [] and watch.frozen(11.0) == [7]


def test_who_was_continued_is_not_frozen():
    watch = StoppedProcesses()
    watch.look([7], 10.0)
    watch.look([], 10.5)
    watch.look([7], 10.8)
    assert watch.frozen(11.5) == [] and watch.frozen(11.8) == [7]


def test_whoever_stays_frozen_is_looked_at_once_a_second():
    watch = StoppedProcesses()
    watch.look([7], 10.0)
    watch.look([7], 11.0)
    assert watch.deadline_s == 12.0
    watch.look([7, 8], 11.5)
    assert watch.deadline_s == 12.5
    watch.look([], 12.0)
    assert watch.deadline_s is None and watch.frozen(12.0) == []
