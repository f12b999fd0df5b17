"""The Textual application of `paceline top`."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from simulated_training import Training

from paceline.operate.dashboard.aggregator import DashboardAggregator


def told_of(training: Training, seconds: float = 4) -> dict:
    board = DashboardAggregator()
    training.run(seconds)
    board.take(training.look())
    return json.loads(msgspec.json.encode(board.state()))


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
