"""`bench/compat.py` evaluates jobs that run under torchrun and under `paceline run --compat torch`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))  # after `tests`, because both have a module `hosts`

import compat as bench

NAME = "DDP, wide MLP"


def of(distributed: list[float], bare: list[float], parameters: float = 5.0) -> dict[str, object]:
    """Returns the output of a job's rank 0 as a dictionary."""
    return {"times": {"distributed": distributed, "bare": bare}, "parameters": parameters}


def test_a_row_has_the_share_of_communication_and_the_ratio():
    gloo, ours = bench.rows_of(
        NAME,
        {
            "gloo": [of([0.4, 0.4], [0.1, 0.1]), of([0.5], [0.2])],
            bench.OURS: [of([0.2, 0.2], [0.1, 0.1]), of([0.3], [0.1])],
        },
    )
    assert (gloo["by"], gloo["n"], gloo["p50 ms"]) == ("gloo", 3 * bench.STEPS, 400.0)
    assert gloo["communication"] == pytest.approx(0.75) and ours["communication"] == pytest.approx(0.5)
    assert ours["ratio"] == 1.0 and gloo["ratio"] == pytest.approx(2.0)
    assert ours["ratio to bare"] == 1.0 and gloo["ratio to bare"] == pytest.approx(4 / 2)


def test_jobs_that_end_with_other_parameters_are_refused():
    jobs = {"gloo": [of([0.4], [0.1])], bench.OURS: [of([0.2], [0.1], parameters=5.1)]}
    with pytest.raises(SystemExit, match="ends with other parameters"):
        bench.rows_of(NAME, jobs)


@pytest.mark.parametrize(("by", "told"), [("gloo", bench.TOLD), (bench.OURS, "")])
def test_a_job_with_the_wrong_engine_is_refused(monkeypatch, by, told):
    done = subprocess.CompletedProcess([], 0, stdout='[rank 0] {"times": {}}\n', stderr=told)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit, match=f"{NAME} by {by}"):
        bench.job(by, NAME, 2)


def test_what_rank_0_prints_is_found_behind_its_name(monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout='[rank 0] {"times": {}}\n', stderr=f"x {bench.TOLD} y")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert bench.job(bench.OURS, NAME, 2) == {"times": {}}
