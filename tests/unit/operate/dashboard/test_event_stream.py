"""Changes that viewers of the dashboard receive."""

from __future__ import annotations

import json

import pytest
from simulated_training import Training

from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.event_stream import Feed, changes


def merged(viewer: dict, message: bytes) -> None:
    """Merges a message as static/state.js does."""
    for name, value in json.loads(message).items():
        if isinstance(value, dict) and "epoch" in value:
            old = viewer.get(name, {"epoch": None, "first": 0, "items": []})
            first = old["first"]
            kept = old["items"][max(0, value["first"] - first) : max(0, value["from"] - first)]
            items = kept + value["items"] if old["epoch"] == value["epoch"] else value["items"]
            viewer[name] = {"epoch": value["epoch"], "first": value["first"], "from": value["first"], "items": items}
        else:
            viewer[name] = value


@pytest.mark.parametrize("sees", [lambda number: True, lambda number: number % 7 == 0, lambda number: number > 30])
def test_changes_lead_to_what_a_snapshot_shows(sees):
    training, board, feed = Training(3, hangs=(1, 330)), DashboardAggregator(), Feed("life")
    viewer: dict = {}
    seen: str | None = None
    for number in range(60):
        training.run(0.9)
        board.take(training.look())
        feed.publish(board.state())
        if sees(number):
            for message in feed.since(seen):
                if message.is_snapshot:
                    viewer = {}
                merged(viewer, message.data)
                seen = f"life-{message.number}"
    for message in feed.since(seen):
        merged(viewer, message.data)
    whole: dict = {}
    merged(whole, feed.snapshot().data)
    assert {name: value for name, value in viewer.items() if value is not None} == whole
    assert viewer["verdict"]["ranks"] == [1]


def test_what_has_not_changed_is_not_sent():
    training, board = Training(2), DashboardAggregator()
    training.run(2)
    board.take(training.look())
    before = board.state()
    assert changes(before, board.state()) == {}
    feed = Feed("life")
    assert feed.publish(before) is not None
    assert feed.publish(board.state()) is None


def test_one_second_of_64_ranks_is_a_small_message():
    training, board, feed = Training(64), DashboardAggregator(), Feed("life")
    for _ in range(30):
        training.run(1.0)
        board.take(training.look())
        message = feed.publish(board.state())
    assert message is not None and len(message.data) < 64 * 2048
