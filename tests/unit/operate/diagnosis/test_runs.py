"""Job directories: retention, listing, and contents."""

from __future__ import annotations

import json
import os
from pathlib import Path

from launching import run

from paceline.operate.diagnosis.runs import (
    MOST_RUNS,
    MOST_RUNS_WITH_FAILURES,
    JobRun,
    RunStatus,
    list_runs,
    outdated,
    read_run,
    runs_directory,
)

DAY_S = 86400.0


def a_run(number: int, state: RunStatus = RunStatus.FINISHED, started_s: float | None = None) -> JobRun:
    started = float(number) if started_s is None else started_s
    return JobRun(f"r{number}", Path(f"/r{number}"), "job", ("train.py",), "host", 2, started, None, state, 0)


def test_the_oldest_jobs_go_first():
    runs = [a_run(number) for number in range(MOST_RUNS + 3)]
    assert sorted(run.id for run in outdated(runs, now_s=1e9)) == ["r0", "r1", "r2"]


def test_failures_of_today_and_running_jobs_stay():
    now_s = 10 * DAY_S
    new = [a_run(100 + number, started_s=now_s) for number in range(MOST_RUNS)]
    old = [
        a_run(1, RunStatus.FAILED, now_s - DAY_S / 2),
        a_run(2, RunStatus.FAILED, now_s - 2 * DAY_S),
        a_run(3, RunStatus.RUNNING, now_s - 2 * DAY_S),
        a_run(4, RunStatus.FINISHED, now_s - DAY_S / 2),
    ]
    assert sorted(run.id for run in outdated(new + old, now_s)) == ["r2", "r4"]


def test_the_lines_of_exits_are_read(tmp_path):
    facts = {"job": "j", "command": [], "host": "elsewhere", "workers": 2, "started_s": 1.0, "state": "failed"}
    for lines in ({}, {"exit_lines": {"1": "train.py:9"}}):
        (tmp_path / "job.json").write_text(json.dumps({**facts, **lines}))
        assert read_run(tmp_path).exit_lines == ({1: "train.py:9"} if lines else {})


def test_failures_are_bounded_too():
    now_s = DAY_S
    runs = [a_run(number, RunStatus.FAILED, now_s - number) for number in range(2 * MOST_RUNS_WITH_FAILURES)]
    assert len(outdated(runs, now_s)) == MOST_RUNS_WITH_FAILURES


def test_jobs_are_where_programs_keep_their_state():
    assert runs_directory({"PACELINE_RUNS_DIR": "/a"}) == Path("/a")
    assert runs_directory({"XDG_STATE_HOME": "/b"}) == Path("/b/paceline/runs")
    assert runs_directory({}) == Path(os.path.expanduser("~/.local/state/paceline/runs"))


def test_a_job_whose_launcher_is_gone_is_lost(tmp_path):
    facts = {"job": "j", "command": ["x"], "host": os.uname().nodename, "workers": 1, "started_s": 1.0}
    for name, pid, started in (("a", os.getpid(), "not when it started"), ("b", 2**22 + 1, "0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(
            json.dumps({**facts, "pid": pid, "pid_started": started, "state": "running"})
        )
    assert [each.state for each in list_runs(tmp_path)] == [RunStatus.LOST, RunStatus.LOST]


def test_recordings_lie_beside_the_output_in_a_log_directory(tmp_path, script):
    program = script("import paceline; paceline.log(loss=1); print('said')")
    assert run("--nproc-per-node=1", "--log-dir", str(tmp_path / "logs"), "--rdzv-id=job", program).returncode == 0
    directory = tmp_path / "logs" / "job"
    assert sorted(path.name for path in (directory / "attempt_0" / "0").iterdir()) == [
        "recording.record",
        "stderr.log",
        "stdout.log",
    ]
    assert json.loads((directory / "job.json").read_text())["state"] == "finished"


def test_a_full_disk_does_not_disturb_a_job(tmp_path, script):
    (tmp_path / "runs").write_text("a file where the directory should be")
    environment = {**os.environ, "PACELINE_RUNS_DIR": str(tmp_path / "runs")}
    program = script("import paceline; from paceline import _core; paceline.log(loss=1); print(_core.is_recording())")
    done = run("--nproc-per-node=1", program, env=environment)
    assert (done.returncode, done.stdout) == (0, "[rank 0] True\n")
