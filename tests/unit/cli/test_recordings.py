"""Commands that list the jobs on a machine."""

from __future__ import annotations

import json
import os

from launching import run

from paceline.cli.recordings import line_of
from paceline.operate.diagnosis.recording_reader import read_directory
from paceline.operate.diagnosis.runs import (
    RunStatus,
    list_runs,
)


def test_a_job_leaves_a_directory_that_says_how_it_ended(tmp_path, script):
    environment = {**os.environ, "PACELINE_RUNS_DIR": str(tmp_path / "runs"), "SOME_VARIABLE": "its value"}
    program = script("import paceline; paceline.log(loss=1); raise SystemExit(3)")
    done = run("--nproc-per-node=1", program, "--token", "hidden", env=environment)
    assert done.returncode == 1, done.stderr
    (found,) = list_runs(tmp_path / "runs")
    assert (found.state, found.exit_code, found.workers) == (RunStatus.FAILED, 1, 1)
    assert found.command == (program, "--token", "***") and "failed (1)" in line_of(found)
    text = (found.directory / "job.json").read_text()
    assert "SOME_VARIABLE" in text and "its value" not in text and "hidden" not in text
    assert json.loads(text)["versions"].keys() >= {"paceline", "python", "torch"}
    assert [event.name for event in read_directory(found.directory)[0].events] == ["loss"]
    assert '"event": "failure"' in (found.directory / "events.jsonl").read_text()
    assert found.directory.stat().st_mode & 0o077 == 0
