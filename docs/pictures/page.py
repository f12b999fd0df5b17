"""Draws the pictures of docs/observe.md from a simulated job: the live page in Chromium, and `paceline top`.

    python docs/pictures/page.py        needs Chromium; without it, only top.svg is drawn

The job is tests/support/simulated_training.py, so the pictures are reproducible except for the browser's fonts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import msgspec
from terminal import render

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from browser import Browser, installed
from simulated_training import Training

from paceline.cli.top.text_view import lines_of
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.dashboard_state import DashboardState
from paceline.operate.dashboard.report import report

HERE = Path(__file__).parent
WIDTH, TALLEST = 1360, 1200
SECONDS = 60


def straggler() -> DashboardState:
    """Returns the state of a job with four ranks whose last rank is slow."""
    return pictured(Training(4, slow={3: 1.22}, restarts=1), SECONDS)


def stuck() -> DashboardState:
    """Returns the state of a job with 64 ranks, one of which waits for its data."""
    return pictured(Training(64, hangs=(37, 400), ranks_per_host=8), SECONDS)


def pictured(training: Training, seconds: int) -> DashboardState:
    board = DashboardAggregator()
    for _ in range(seconds):
        training.run(1.0)
        board.take(training.look())
    return board.state()


def photograph(picture: DashboardState, dark: bool) -> bytes:
    """Returns a screenshot of the page as WebP."""
    with tempfile.TemporaryDirectory() as directory, Browser(WIDTH, 900, dark=dark) as browser:
        path = Path(directory, "page.html")
        path.write_bytes(report(picture, ""))
        browser.open(path.as_uri())
        browser.wait_for("document.getElementById('sentence').textContent.includes('rank')")
        height = browser.wait_for("document.querySelectorAll('canvas').length > 2 && document.body.scrollHeight")
        shown = min(height, TALLEST)
        browser.resize(WIDTH, shown)
        browser.wait_for(f"new Promise(done => setTimeout(() => done(innerHeight === {shown}), 500))")
        return browser.screenshot(kind="webp")


def main() -> None:
    told = json.loads(msgspec.json.encode(straggler()))
    text = "$ paceline top\n" + "\n".join(lines_of(told, 110, 30, is_colored=True))
    (HERE / "top.svg").write_text(render(text, "paceline top"))
    print("top.svg")
    if installed() is None:
        print("Chromium was not found, so page.webp and page-stuck.webp are not updated")
        return
    for name, picture, dark in (("page.webp", straggler(), False), ("page-stuck.webp", stuck(), True)):
        (HERE / name).write_bytes(photograph(picture, dark))
        print(name)


if __name__ == "__main__":
    main()
