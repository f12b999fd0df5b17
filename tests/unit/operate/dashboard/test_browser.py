"""Tests of the page in a browser, if Chromium is installed; `make nightly` runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from browser import Browser, installed
from simulated_training import Training

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from paceline.operate.dashboard.access import Access
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.report import report
from paceline.operate.dashboard.server import DashboardServer, ListenAddress

pytestmark = [pytest.mark.soak, pytest.mark.skipif(installed() is None, reason="there is no Chromium")]

TOKEN = "0123456789abcdef0123456789abcdef"
TEXT = "document.getElementById('{}').textContent"
CLICK_MS = 100


def text_of(name: str) -> str:
    return TEXT.format(name)


@pytest.fixture
def opened() -> Iterator[Callable[..., Browser]]:
    """Opens the page of a simulated job in a browser."""
    closing: list[Callable[[], None]] = []

    def opening(training: Training, seconds: float = 30, acts: bool = False, dark: bool = False) -> Browser:
        training.run(seconds)
        looked_s = time.monotonic()

        def look():
            nonlocal looked_s
            training.run(time.monotonic() - looked_s)
            looked_s = time.monotonic()
            return training.look()

        listener = ListenAddress().listen()
        port = listener.getsockname()[1]
        serving = DashboardServer(listener, look, Access(TOKEN, "job", acts=acts), actions={"stacks": lambda: "taken"})
        closing.append(serving.close)
        browser = Browser(dark=dark)
        closing.append(lambda: browser.__exit__())
        browser.open(f"http://localhost:{port}/?token={TOKEN}")
        browser.wait_for(f"{text_of('sentence')}.includes('rank')")
        browser.wait_for("document.querySelectorAll('canvas').length > 2")
        return browser

    yield opening
    for close in reversed(closing):
        close()


def test_the_page_draws_without_an_error_and_hides_the_token(opened):
    page = opened(Training(4, slow={3: 1.25}))
    assert page.value("location.search") == ""
    assert page.value("document.cookie") == ""
    assert "if rank 3 were like the others" in page.value(text_of("what-if"))
    assert page.value("document.querySelectorAll('#ranks tbody tr').length") == 4
    assert page.value("document.querySelectorAll('#curves canvas').length") == 2
    assert page.errors() == []


def test_text_of_the_job_does_not_become_html(opened):
    page = opened(Training(4))
    page.wait_for(f"{text_of('log')}.includes('<b>The given')")
    assert page.value("document.querySelectorAll('#log b').length") == 0


def test_a_hang_shows_its_sentence_and_its_rank_first(opened):
    page = opened(Training(64, hangs=(37, 100)))
    page.wait_for(f"{text_of('verdict')}.includes('rank 37 has not reached this call')", 60)
    assert page.value("document.querySelector('#ranks tbody tr td').textContent") == "37"
    assert page.value("document.body.className") == "health-bad"


@pytest.mark.parametrize("ranks", [4, 64])
def test_a_click_is_answered_at_once(opened, ranks):
    page = opened(Training(ranks))
    clicks = page.value(
        "(async () => { const took = [];"
        " for (let i = 0; i < 20; i += 1) {"
        "  const row = document.querySelectorAll('#ranks tbody tr')[i % 4];"
        "  const began = performance.now(); row.click();"
        "  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));"
        "  took.push(performance.now() - began); }"
        " return took.sort((a, b) => a - b); })()"
    )
    assert clicks[0] < CLICK_MS, clicks  # slower clicks may have waited for a core
    assert page.errors() == []


def test_a_rank_that_is_chosen_is_chosen_everywhere(opened):
    page = opened(Training(4))
    page.value("document.querySelectorAll('#ranks tbody tr')[2].click()")
    assert page.value("document.querySelector('tr.chosen td').textContent") == "2"
    assert page.value("document.getElementById('log-rank').value") == "2"
    shown = "[...document.querySelectorAll('#log div:not(.away) .who')].every(who => who.textContent === 'rank 2')"
    assert page.value(shown)


def test_a_paused_page_stands_still_until_it_goes_on(opened):
    page = opened(Training(4))
    page.value("document.getElementById('pause').click()")
    before = page.value(text_of("sentence"))
    time.sleep(2.5)
    assert page.value(text_of("sentence")) == before
    page.value("document.getElementById('pause').click()")
    page.wait_for(f"{text_of('sentence')} !== {before!r}")


def test_stacks_can_be_asked_for_if_the_flags_allow_it(opened):
    page = opened(Training(4, hangs=(3, 100)), acts=True)
    page.wait_for("!!document.querySelector('#verdict button')", 60)
    page.value("document.querySelector('#verdict button').click()")
    page.wait_for(f"{text_of('answer')}.includes('taken')")


def test_the_dark_page_is_dark(opened):
    page = opened(Training(4), dark=True)
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(14, 19, 26)"


def test_a_report_draws_from_a_file_without_an_error(tmp_path):
    board, training = DashboardAggregator(), Training(4)
    training.run(20)
    board.take(training.look())
    path = tmp_path / "report.html"
    path.write_bytes(report(board.state(), "made by a test"))
    with Browser() as page:
        page.open(path.as_uri())
        page.wait_for("document.querySelectorAll('canvas').length > 4")
        assert "4 of 4 ranks" in page.value(text_of("sentence"))
        assert page.errors() == []
