"""`paceline top`: lines of text, Textual's screen, and finding the page of a job."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from simulated_training import Training

from paceline.cli.main import main
from paceline.cli.top.client import Address, UnreachableError, picture
from paceline.cli.top.finding import NoPageError, find
from paceline.cli.top.lines import lines_of
from paceline.observe.live.board import Board

ESCAPE = re.compile(r"\x1b\[\d*m")


def told_of(training: Training, seconds: float = 4) -> dict:
    board = Board()
    training.run(seconds)
    board.take(training.look())
    return json.loads(msgspec.json.encode(board.picture()))


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
    assert any("more ranks, all faster than these" in line for line in lines)


def test_a_verdict_stands_above_the_ranks_and_its_rank_first():
    lines = lines_of(told_of(Training(64, hangs=(40, 20)), 20), 120, 24, is_coloured=False)
    text = "\n".join(lines)
    assert text.startswith("Stuck for ") and "rank 40 is not there" in text
    assert next(line for line in lines if " node" in line).split()[0] == "40"


def test_without_colour_there_are_no_escapes():
    assert "\x1b" not in "".join(lines_of(told_of(Training(4)), 100, 30, is_coloured=False))


def test_before_the_first_step_there_are_lines_too():
    assert any("no step is finished yet" in line for line in lines_of(told_of(Training(2), 0), 100, 30, False))


def test_addresses_are_parsed_as_they_are_printed():
    address = Address.parse("http://localhost:8080/proxy/1/?token=ab12")
    assert (address.token, address.host, address.port, address.prefix) == ("ab12", "localhost", 8080, "/proxy/1")
    for wrong in ("https://localhost:1/?token=x", "http://localhost/?token=x", "http://localhost:1/"):
        with pytest.raises(NoPageError, match="is not the address of a page"):
            find(wrong)


def test_the_latest_running_job_with_a_page_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNS_DIR", str(tmp_path))
    with pytest.raises(NoPageError, match="no job of yours runs"):
        find(None)
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    for name, started_s, has_page in (("old", 1.0, True), ("new", 2.0, True), ("newest", 3.0, False)):
        (tmp_path / name).mkdir()
        facts = {"job": name, "command": [], "host": os.uname().nodename, "workers": 1, "started_s": started_s}
        facts |= {"state": "running", "pid": os.getpid(), "pid_started": stat}
        (tmp_path / name / "job.json").write_text(json.dumps(facts))
        if has_page:
            (tmp_path / name / "page.json").write_text(json.dumps({"token": name, "prefix": "", "port": 5}))
    assert find(None).token == "new"
    assert find("old").token == find(str(tmp_path / "old")).token == "old"
    with pytest.raises(NoPageError, match="newest is no directory of a running job"):
        find("newest")


def test_a_page_that_is_gone_is_told(capsys):
    with pytest.raises(UnreachableError, match="does not answer"):
        picture(Address("x", port=1))
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
            assert "rank 5 is not there" in str(app.query_one("#verdict", Static).render())
            assert str(table.get_row_at(0)[0]) == "0"
            for _ in range(5):
                await pilot.press("s")
            slowest = max(told["ranks"], key=lambda row: row["compute"])
            assert str(table.get_row_at(0)[0]) == str(slowest["rank"])
            assert len(app.query_one("#log", RichLog).lines) > 0
            await pilot.press("f")
            await pilot.press("q")

    asyncio.run(use())
