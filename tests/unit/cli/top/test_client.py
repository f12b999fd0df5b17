"""`paceline top`: text lines, Textual's screen, the search for a job, and jobs without a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cli.top.client import NoRunningJobError, PageAddress, PageUnreachableError, find, picture, poller_of
from paceline.operate.dashboard.external_collector import EventFollower, ExternalCollector
from paceline.operate.diagnosis.runs import JobRun, read_run
from paceline.operate.launch.job_directory import JobRecordings


def test_a_diagnosis_is_read_from_the_events(tmp_path):
    path = tmp_path / "events.jsonl"
    events = EventFollower(path)
    assert events.take() == []
    now_s = time.time()
    stall = {"event": "stall", "time_s": now_s, "reason": "rank 1 does not call barrier", "ranks": [1]}
    path.write_text(json.dumps(stall) + "\n" + json.dumps({"event": "resume", "time_s": now_s + 3, "reason": "ok"}))
    event, notice = events.take()
    assert (event.kind, notice.sentence, notice.ranks) == ("stall", "rank 1 does not call barrier", (1,))
    assert abs(notice.at_s - time.monotonic()) < 5
    path.write_text(path.read_text() + "\n")
    event, withdrawn = events.take()
    assert (event.kind, event.cost_s, withdrawn) == ("resume", 3.0, None)
    assert events.take() == []


def test_addresses_are_parsed_as_they_are_printed():
    address = PageAddress.parse("http://localhost:8080/proxy/1/?token=ab12")
    assert (address.token, address.host, address.port, address.prefix) == ("ab12", "localhost", 8080, "/proxy/1")
    for wrong in ("https://localhost:1/?token=x", "http://localhost/?token=x", "http://localhost:1/"):
        with pytest.raises(NoRunningJobError, match="is not the address of a page"):
            find(wrong)


def job_directory(root: Path, name: str, started_s: float, page: bool) -> Path:
    """Returns the directory of a job whose launcher is this process."""
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    facts = {"job": name, "command": ["train.py"], "host": os.uname().nodename, "workers": 1, "started_s": started_s}
    facts |= {"state": "running", "pid": os.getpid(), "pid_started": stat, "world_size": 2}
    (root / name).mkdir()
    (root / name / "job.json").write_text(json.dumps(facts))
    if page:
        (root / name / "page.json").write_text(json.dumps({"token": name, "prefix": "", "port": 5}))
    return root / name


def test_the_latest_running_job_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNS_DIR", str(tmp_path))
    with pytest.raises(NoRunningJobError, match="none of your jobs is running"):
        find(None)
    old = job_directory(tmp_path, "old", 1.0, page=True)
    assert find(None).token == find("old").token == find(str(old)).token == "old"
    job_directory(tmp_path, "new", 2.0, page=False)
    for found in (find(None), find("new")):
        assert isinstance(found, JobRun) and (found.job, found.pid) == ("new", os.getpid())
    told = json.loads((old / "job.json").read_text())
    (old / "job.json").write_text(json.dumps({**told, "state": "failed"}))
    with pytest.raises(NoRunningJobError, match="old is not running: failed"):
        find("old")
    with pytest.raises(NoRunningJobError, match="elsewhere is neither the directory of a job"):
        find("elsewhere")


RECORDED = """
import sys
from paceline import _core
from paceline.comm.record import recorder
recorder.begin()
recorder.identify(1, 2)
stuck = _core.RecordedCall(recorder.open_group("g", "test", 7, 1, [0, 1]), 1, 1, 1, 5, 1000, -1, False, -1)
print("recorded", flush=True)
sys.stdin.read()
"""


def test_a_job_without_a_page_is_seen_by_its_recordings(tmp_path):
    kept = JobRecordings(None).new(1, 1)
    assert kept is not None
    worker = subprocess.Popen(
        [sys.executable, "-c", RECORDED],
        env={**os.environ, **kept.variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    view = ExternalCollector(read_run(job_directory(tmp_path, "job", time.time() - 5, page=False)))
    try:
        assert worker.stdout.readline() == "recorded\n"
        (row,) = view.look().ranks
        assert (row.rank, row.pid, row.host) == (1, worker.pid, os.uname().nodename)
        assert row.memory_nbytes > 1 << 20
        worker.communicate("", timeout=60)
        assert view.look().ranks[0].state == "ended"
        kept.release()
        view.look()
    finally:
        worker.kill()
        worker.wait(60)
        view.close()
        kept.release()


def test_a_job_that_has_ended_is_told(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    run = replace(read_run(job_directory(tmp_path, "job", 1.0, page=False)), pid=gone.pid)
    facts = json.loads((tmp_path / "job" / "job.json").read_text())
    (tmp_path / "job" / "job.json").write_text(json.dumps({**facts, "state": "finished"}))
    look = poller_of(run)
    with pytest.raises(PageUnreachableError, match="the job has ended"):
        look()


def test_a_page_that_is_gone_is_told(capsys):
    with pytest.raises(PageUnreachableError, match="does not answer"):
        picture(PageAddress("x", port=1))
    assert main(["top", "--once", "http://localhost:1/?token=x"]) == 2
    assert "paceline top: the job's launcher does not answer" in capsys.readouterr().err
