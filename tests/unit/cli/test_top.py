"""`paceline top`: text lines, Textual's screen, finding a job, and jobs without a page."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from simulated_training import Training

from paceline.cli.main import main
from paceline.cli.top.client import NoRunningJobError, PageAddress, PageUnreachableError, find, picture, poller_of
from paceline.cli.top.text_view import lines_of
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.external_collector import EventFollower, ExternalCollector
from paceline.operate.diagnosis.runs import JobRun, read_run
from paceline.operate.launch.job_directory import RecordingKeeper

ESCAPE = re.compile(r"\x1b\[\d*m")


def told_of(training: Training, seconds: float = 4) -> dict:
    board = DashboardAggregator()
    training.run(seconds)
    board.take(training.look())
    return json.loads(msgspec.json.encode(board.state()))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_lines_fit_the_terminal(width, height):
    for ranks in (1, 4, 64):
        lines = lines_of(told_of(Training(ranks, slow={0: 1.3})), width, height, is_coloured=True)
        assert len(lines) <= height
        assert max(len(ESCAPE.sub("", line)) for line in lines) <= width


def test_where_ranks_do_not_fit_the_slowest_come_first():
    lines = lines_of(told_of(Training(64, slow={37: 1.3})), 120, 24, is_coloured=False)
    rows = [line for line in lines if " node" in line]
    assert rows[0].split()[0] == "37" and len(rows) < 20
    assert any("more ranks" in line for line in lines)


def test_a_verdict_stands_above_the_ranks_and_its_rank_first():
    lines = lines_of(told_of(Training(64, hangs=(40, 20)), 20), 120, 24, is_coloured=False)
    text = "\n".join(lines)
    assert text.startswith("Stuck for ") and "rank 40 has not reached this call" in text
    assert next(line for line in lines if " node" in line).split()[0] == "40"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_what_a_rank_does_is_shown_whole(width):
    told = told_of(Training(4, slow={0: 1.3}))
    doing = "in all_reduce(float32, 68,362), call 66 for 19 s"
    told["ranks"] = [{**row, "doing": doing, "host": "node-with-a-long-name"} for row in told["ranks"]]
    rows = [line for line in lines_of(told, width, 40, is_coloured=False) if doing in line]
    assert len(rows) == 4 and max(map(len, rows)) <= width
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]


def test_calls_that_are_owed_are_shown():
    told = told_of(Training(4)) | {"owed": ["ranks 0, 2 wait for rank 1 in barrier() call 3, for 19 s"]}
    assert "Ranks 0, 2 wait for rank 1 in barrier() call 3, for 19 s." in lines_of(told, 100, 30, is_coloured=False)


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


def test_without_colour_there_are_no_escapes():
    assert "\x1b" not in "".join(lines_of(told_of(Training(4)), 100, 30, is_coloured=False))


def test_before_the_first_step_there_are_lines_too():
    assert any("no step has finished yet" in line for line in lines_of(told_of(Training(2), 0), 100, 30, False))


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
    kept = RecordingKeeper(None).new(1, 1)
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


def test_links_are_lines_and_a_slow_one_is_told():
    told = told_of(Training(8, ranks_per_host=4))
    text = "\n".join(lines_of(told, 120, 40, is_coloured=False))
    assert re.search(r"^ +3 to 4 +300.0 MB/s +420.0 MB/s +0.20 ms +1$", text, re.MULTILINE), text
    told["network"] = "the slowest link is that from h1 to h2"
    assert "The slowest link is that from h1 to h2." in lines_of(told, 120, 40, is_coloured=False)


def test_a_page_that_is_gone_is_told(capsys):
    with pytest.raises(PageUnreachableError, match="does not answer"):
        picture(PageAddress("x", port=1))
    assert main(["top", "--once", "http://localhost:1/?token=x"]) == 2
    assert "paceline top: the job's launcher does not answer" in capsys.readouterr().err


def test_textual_shows_sorts_and_filters():
    pytest.importorskip("textual")
    from textual.widgets import DataTable, RichLog, Static

    from paceline.cli.top.app import Top

    told = told_of(Training(8, hangs=(5, 20)), 20)

    async def use() -> None:
        app = Top(lambda: told, every_s=0.1)
        async with app.run_test(size=(120, 40)) as pilot:
            table = app.query_one("#ranks", DataTable)
            for _ in range(100):
                await pilot.pause(0.05)
                if table.row_count == 8:
                    break
            assert table.row_count == 8
            assert "rank 5 has not reached this call" in str(app.query_one("#verdict", Static).render())
            assert str(table.get_row_at(0)[0]) == "0"
            for _ in range(5):
                await pilot.press("s")
            slowest = max(told["ranks"], key=lambda row: row["compute"])
            assert str(table.get_row_at(0)[0]) == str(slowest["rank"])
            assert len(app.query_one("#log", RichLog).lines) > 0
            await pilot.press("f")
            await pilot.press("q")

    asyncio.run(use())
