"""Metrics that the dashboard exports."""

from __future__ import annotations

from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.application import metrics
from paceline.operate.dashboard.job_sample import (
    JobInfo,
    JobSample,
    RankSample,
    StallNotice,
)


def test_metrics_are_escaped_and_finite():
    board = DashboardAggregator()
    facts = JobInfo('a "job"\n', world_size=1)
    board.take(
        JobSample(
            1.0, facts, (RankSample(0, "host\\x", values=((0, "loss", float("nan")),)),), verdict=StallNotice("stuck")
        )
    )
    for step in range(1, 8):
        board.take(JobSample(2.0, facts, (RankSample(0, "host\\x", values=((step, "loss", float("inf")),)),)))
    text = metrics(board.state())
    assert 'paceline_logged{job="a \\"job\\"\\n",name="loss"} +Inf' in text
    assert 'host="host\\\\x"' in text
    assert all(line.startswith(("# ", "paceline_")) for line in text.splitlines())
