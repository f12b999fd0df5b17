"""Lines that `paceline top` shows, at any terminal size."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from simulated_training import Training

from paceline.cli.top.text_view import lines_of
from paceline.operate.dashboard.aggregator import DashboardAggregator

ESCAPE = re.compile(r"\x1b\[\d*m")


def told_of(training: Training, seconds: float = 4) -> dict:
    board = DashboardAggregator()
    training.run(seconds)
    board.take(training.look())
    return json.loads(msgspec.json.encode(board.state()))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_lines_fit_the_terminal(width, height):
    for ranks in (1, 4, 64):
        lines = lines_of(told_of(Training(ranks, slow={0: 1.3})), width, height, is_colored=True)
        assert len(lines) <= height
        assert max(len(ESCAPE.sub("", line)) for line in lines) <= width


def test_where_ranks_do_not_fit_the_slowest_come_first():
    lines = lines_of(told_of(Training(64, slow={37: 1.3})), 120, 24, is_colored=False)
    rows = [line for line in lines if " node" in line]
    assert rows[0].split()[0] == "37" and len(rows) < 20
    assert any("more ranks" in line for line in lines)


def test_a_verdict_stands_above_the_ranks_and_its_rank_first():
    lines = lines_of(told_of(Training(64, hangs=(40, 20)), 20), 120, 24, is_colored=False)
    text = "\n".join(lines)
    assert text.startswith("Stuck for ") and "rank 40 has not reached this call" in text
    assert next(line for line in lines if " node" in line).split()[0] == "40"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_what_a_rank_does_is_shown_whole(width):
    told = told_of(Training(4, slow={0: 1.3}))
    doing = "in all_reduce(float32, 68,362), call 66 for 19 s"
    told["ranks"] = [{**row, "doing": doing, "host": "node-with-a-long-name"} for row in told["ranks"]]
    rows = [line for line in lines_of(told, width, 40, is_colored=False) if doing in line]
    assert len(rows) == 4 and max(map(len, rows)) <= width
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]


def test_calls_that_are_owed_are_shown():
    told = told_of(Training(4)) | {"owed": ["ranks 0, 2 wait for rank 1 in barrier() call 3, for 19 s"]}
    assert "Ranks 0, 2 wait for rank 1 in barrier() call 3, for 19 s." in lines_of(told, 100, 30, is_colored=False)


def test_without_color_there_are_no_escapes():
    assert "\x1b" not in "".join(lines_of(told_of(Training(4)), 100, 30, is_colored=False))


def test_before_the_first_step_there_are_lines_too():
    assert any("no step has finished yet" in line for line in lines_of(told_of(Training(2), 0), 100, 30, False))


def test_links_are_lines_and_a_slow_one_is_told():
    told = told_of(Training(8, ranks_per_host=4))
    text = "\n".join(lines_of(told, 120, 40, is_colored=False))
    assert re.search(r"^ +3 to 4 +300.0 MB/s +420.0 MB/s +0.20 ms +1$", text, re.MULTILINE), text
    told["network"] = "the slowest link is that from h1 to h2"
    assert "The slowest link is that from h1 to h2." in lines_of(told, 120, 40, is_colored=False)
