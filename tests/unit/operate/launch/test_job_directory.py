"""The directory of a job: its permissions, and data that is not written to it."""

from __future__ import annotations

import json
import os
import socket
import stat
from dataclasses import replace

import pytest

from paceline.operate.dashboard.server import write_address
from paceline.operate.launch.job import Command, Job, OutputOptions
from paceline.operate.launch.job_directory import Events, JobDirectory, without_secrets
from paceline.operate.launch.workers.output import Console, LogFile


def test_values_that_seem_secret_are_not_written_down():
    argv = ("train.py", "--token=abc", "--api-key", "xyz", "--lr", "0.1", "password=p", "--auth", "--verbose")
    shown = ["train.py", "--token=***", "--api-key", "***", "--lr", "0.1", "password=***", "--auth", "--verbose"]
    assert without_secrets(argv) == shown


pytestmark = pytest.mark.usefixtures("no_secret")

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")

SOMEBODY = 12345

JOB = Job(Command(("x.py",)), workers=1, run_id="job")


@only_root
def test_a_job_is_not_recorded_in_a_directory_of_another_user(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    os.chown(tmp_path / "runs", SOMEBODY, -1)
    monkeypatch.setenv("PACELINE_RUNS_DIR", str(tmp_path / "runs"))
    directory = JobDirectory(JOB)
    assert directory.path is None and os.listdir(tmp_path / "runs") == []
    assert directory.remark is not None and directory.remark.startswith("`paceline runs` will not list this job: ")
    assert directory.remark.endswith(
        f" belongs to user {SOMEBODY}, who could replace its contents; choose a directory of user 0"
    )


def test_a_chosen_directory_that_cannot_be_made_is_remarked(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_RUNS_DIR", str(tmp_path / "file" / "runs"))
    directory = JobDirectory(JOB)
    assert directory.path is None and "the directory in PACELINE_RUNS_DIR cannot be used: " in str(directory.remark)
    output = OutputOptions(log_dir=str(tmp_path / "file" / "logs"))
    assert JobDirectory(replace(JOB, output=output)).remark is None  # the output reports it in its own error
    monkeypatch.delenv("PACELINE_RUNS_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert JobDirectory(JOB).remark is None


def test_no_file_of_a_job_follows_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in ("stdout.log", "events.jsonl", "page.json"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(OSError, match="cannot hold the workers' output"):
        LogFile(tmp_path / "stdout.log", print)
    Events(False, "job", Console(), tmp_path).write("started")
    with socket.socket() as listener:
        write_address(tmp_path / "page.json", listener, "token", "")
    assert precious.read_text() == "precious"
    assert stat.S_IMODE((tmp_path / "page.json").lstat().st_mode) == 0o600
    assert json.loads((tmp_path / "page.json").read_text())["token"] == "token"
