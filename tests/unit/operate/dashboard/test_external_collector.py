"""Job directories, read by a process outside the job."""

from __future__ import annotations

import json
import os

import pytest

from paceline.cli.main import main


@pytest.mark.parametrize("command", ["report", "analyze"])
def test_a_directory_that_is_not_a_jobs_is_refused_at_once(tmp_path, capsys, command, monkeypatch):
    deep = tmp_path / "home" / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "recording.record").write_bytes(b"")
    looked_at: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (looked_at.append(str(path)), scandir(path))[1])
    assert main([command, str(tmp_path)]) == 2
    assert f"{tmp_path} contains no recording (*.record) of a job" in capsys.readouterr().err
    assert str(deep.parent) not in looked_at, "a wrong directory is not crawled"
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err


def test_the_directory_of_several_jobs_is_refused(tmp_path, capsys):
    for job in ("first", "second"):
        facts = {"job": job, "command": [], "host": "h", "workers": 1, "started_s": 1.0, "state": "finished"}
        (tmp_path / job).mkdir()
        (tmp_path / job / "job.json").write_text(json.dumps(facts))
    assert main(["report", str(tmp_path)]) == 2
    assert (
        f"contains 2 jobs; specify the directory of one of them, such as {tmp_path / 'first'}"
        in capsys.readouterr().err
    )
