"""Samples of a job: the timing of a step."""

from __future__ import annotations

import pytest

from paceline.operate.dashboard.job_sample import RankStep


@pytest.mark.parametrize(("exposed_s", "compute_s"), [(0.0, 2.0), (0.5, 1.5), (9.0, 0.0)])
def test_a_ranks_own_time_excludes_the_wait_for_communication(exposed_s, compute_s):
    step = RankStep(3, 10.0, 12.0, exposed_s=exposed_s)
    assert (step.duration_s, step.compute_s) == (2.0, compute_s)
