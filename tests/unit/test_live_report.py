"""The report: one file, which needs nothing else, and out of which no text of the job can break."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest
from simulated_training import Training

from paceline.cli.main import main
from paceline.observe.live.assets import MODULES, assets, report
from paceline.observe.live.board import Board
from paceline.observe.live.picture import Picture
from paceline.observe.live.sample import Line

EVIL = "</script><script>alert(1)</script><!-- "


@pytest.fixture(scope="module")
def picture() -> Picture:
    training, board = Training(4), Board()
    training.run(5)
    sample = training.look()
    board.take(replace(sample, lines=(Line(1.0, 0, 1, EVIL),), facts=replace(sample.facts, run_id=EVIL)))
    return board.picture()


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


def test_a_directory_without_recordings_is_named(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no recordings" in capsys.readouterr().err
