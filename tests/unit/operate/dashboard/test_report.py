"""The report is a self-contained file, in which text from the job is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from simulated_training import Training

from paceline.cli.main import main
from paceline.comm.record import layout
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.dashboard_state import DashboardState
from paceline.operate.dashboard.external_collector import aggregate_directories
from paceline.operate.dashboard.job_sample import Line
from paceline.operate.dashboard.report import MODULES, assets, report

EVIL = "</script><script>alert(1)</script><!-- "


@pytest.fixture(scope="module")
def picture() -> DashboardState:
    training, board = Training(4), DashboardAggregator()
    training.run(5)
    sample = training.look()
    board.take(replace(sample, lines=(Line(1.0, 0, 1, EVIL),), facts=replace(sample.facts, run_id=EVIL)))
    return board.state()


def test_a_report_needs_no_other_file(picture):
    page = report(picture, "made by a test").decode()
    markup = re.sub(r"<(script|style)[ >].*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(src|href)=", markup)
    assert "made by a test" in markup
    assert "fetch(" not in page and "EventSource" not in page


def test_text_of_the_job_cannot_end_the_data(picture):
    page = report(picture, EVIL).decode()
    assert "alert(1)</script>" not in page
    data = re.search(r'<script type="application/json" id="picture">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    told = json.loads(data[1])
    assert told["log"]["items"][0]["text"] == EVIL and told["header"]["run_id"] == EVIL


def test_the_policy_allows_just_what_is_in_the_report(picture):
    page = report(picture, "").decode()
    policy = re.search(r'content="(default-src.*?)">', page)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    for kind, text in re.findall(r"<(style|script)(?: type=\"module\")?>(.*?)</\1>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1], kind


def test_modules_share_no_names():
    files = assets()
    seen: dict[str, str] = {}
    for name in (*MODULES, "report.js"):
        text = files[name].decode()
        for found in re.findall(r"^(?:export )?(?:async )?(?:function|const|let) (\w+)", text, re.MULTILINE):
            assert found not in seen, (
                f"{name} and {seen[found]} both define {found}, which the report puts into one scope"
            )
            seen[found] = name
        for module in re.findall(r'from "\./(.*?)"', text):
            assert MODULES.index(module) < (*MODULES, "report.js").index(name)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text)


def test_the_files_of_the_page_are_small():
    assert sum(map(len, assets().values())) < 200_000


STEPS = """
import os, time
from paceline import _core
from paceline.comm.record import recorder
from paceline.comm.record.spans import STEPS
class Loop: pass
loop = Loop()
recorder.begin()
recorder.identify(0, 2)
for _ in range(4):
    STEPS.begin(loop, "mine")
    time.sleep(0.01)
"""


def recorded_elsewhere(data: bytes, rank: int, host: str, boot: bytes, behind_ns: int) -> bytes:
    """Returns another rank's recording with the same times, from a host whose clock is behind."""
    changed = bytearray(data)
    struct.pack_into("<i", changed, 68, rank)
    changed[layout.HOST_AT : layout.HOST_AT + 8] = host.encode().ljust(8, b"\0")
    changed[layout.BOOT_AT : layout.BOOT_AT + len(boot)] = boot
    offset, capacity = layout.HEADER.unpack_from(data)[4:6]
    for at in range(offset, offset + capacity * layout.PAIR.size, layout.PAIR.size):
        stamp, tick, monotonic_ns, realtime_ns = layout.PAIR.unpack_from(changed, at)
        if tick:
            layout.PAIR.pack_into(changed, at, stamp, tick, monotonic_ns - behind_ns, realtime_ns + 77)
    return bytes(changed)


def test_the_report_puts_several_hosts_on_one_clock(tmp_path):
    environment = {**os.environ, "PACELINE_RECORD_DIR": str(tmp_path / "shm")}
    subprocess.run([sys.executable, "-c", STEPS], env=environment, check=True, timeout=60)
    (written,) = (tmp_path / "shm").iterdir()
    behind_ns = 3_600_000_000_000
    for rank, host in enumerate(["h0", "h1"]):
        place = tmp_path / host / "attempt_1" / str(rank)
        place.mkdir(parents=True)
        shift_ns = rank * behind_ns
        boot = b"boot-%d" % rank
        (place / "recording.record").write_bytes(recorded_elsewhere(written.read_bytes(), rank, host, boot, shift_ns))
        clock = {"offset_ns": shift_ns, "error_ns": 1000, "at_ns": 5}
        facts = {"job": "j", "command": [], "host": host, "workers": 1, "started_s": 1.0, "ended_s": 9.0}
        (tmp_path / host / "job.json").write_text(json.dumps({**facts, "state": "finished", "clock": clock}))
        (tmp_path / host / "events.jsonl").write_text('{"event": "end", "time_s": 9.0, "code": 0}\n')
    for directories in ([tmp_path / "h0", tmp_path / "h1"], [tmp_path]):
        shown = aggregate_directories(directories).state()
        assert [(row.rank, row.host) for row in shown.ranks] == [(0, "h0"), (1, "h1")]
        assert shown.timeline is not None
        first, second = (lane.phases for lane in shown.timeline.lanes)
        assert first == second and shown.timeline.span < 60_000
    assert [event.text for event in aggregate_directories([tmp_path / "h0", tmp_path / "h1"]).state().events.items] == [
        "the job has ended"
    ]
    (tmp_path / "h1" / "job.json").unlink()
    by_day = aggregate_directories([tmp_path / "h0", tmp_path / "h1"]).state().timeline
    assert by_day is not None and by_day.span < 60_000


SLOWER = """
import sys, time
from paceline import _core
from paceline.comm.record import recorder
from paceline.comm.record.layout import EventKind
rank = int(sys.argv[1])
recorder.begin()
recorder.identify(rank, 2)
began_ns = time.monotonic_ns() - 2_000_000_000
for number in range(1, 131):
    _core.record_step(number)
    stamp = _core.record_begin_at(int(EventKind.STEP), 0, number, 0, _core.record_tick_at(began_ns))
    began_ns += 1_000_000 * (600 if number == 60 else 4 + 4 * rank)
    _core.record_end_at(stamp, _core.record_tick_at(began_ns))
"""
"""Writes the recording of a rank whose steps take 4 ms, or 8 on rank 1, but one of them 600 ms."""


def test_analyze_and_report_agree_on_what_a_finished_job_took(tmp_path, capsys):
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "PACELINE_RECORD_DIR": str(tmp_path / f"shm{rank}")}
        ranks.append(subprocess.Popen([sys.executable, "-c", SLOWER, str(rank)], env=environment))
    for rank, process in enumerate(ranks):
        assert process.wait(timeout=60) == 0
        (written,) = (tmp_path / f"shm{rank}").iterdir()
        place = tmp_path / "job" / "attempt_0" / str(rank)
        place.mkdir(parents=True)
        written.rename(place / "recording.record")
    assert main(["analyze", "--json", str(tmp_path / "job")]) == 0
    (told,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert told["blamed"] == [1]
    assert main(["report", str(tmp_path / "job"), "-o", str(tmp_path / "report.html")]) == 0
    data = re.search(r'id="picture">(.*?)</script>', (tmp_path / "report.html").read_text(), re.DOTALL)
    assert data is not None
    shown = json.loads(data[1])
    assert shown["what_if"]["sentence"].lower() == f"{told['sentence']}.".lower()
    assert shown["what_if"]["now"] == shown["figures"]["step"]
    assert "if rank 1 had been like the other, a step would have taken" in told["sentence"]
    assert shown["what_if"]["now"] == pytest.approx(6, rel=0.01), "the mean of both ranks, and the pause is no step"
