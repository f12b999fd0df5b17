"""Workers that failed before the launcher terminated them are reported as failed."""

from __future__ import annotations

import signal

import pytest

from paceline.operate.launch.failures import Record
from paceline.operate.launch.workers.worker_group import ended_as_requested

ASKED_S = 100.0
BEFORE, AFTER = (Record(time_s, "ValueError", "ValueError: bad sample") for time_s in (99.0, 101.0))


@pytest.mark.parametrize("code", [1, -signal.SIGTERM, -signal.SIGKILL])
@pytest.mark.parametrize("is_first", [True, False])
def test_one_that_raised_before_it_was_asked_has_failed(code, is_first):
    assert not ended_as_requested(code, BEFORE, ASKED_S, is_first)


def test_one_that_raises_because_it_was_asked_has_not_failed():
    assert ended_as_requested(1, AFTER, ASKED_S, is_first=True)
    assert not ended_as_requested(1, AFTER, ASKED_S, is_first=False), "it tells what another failure meant for it"
    interrupt = Record(99.0, "KeyboardInterrupt", "KeyboardInterrupt")
    assert ended_as_requested(-signal.SIGINT, interrupt, ASKED_S, is_first=True)


@pytest.mark.parametrize("code", [-signal.SIGTERM, -signal.SIGKILL])
def test_one_that_the_signal_ended_has_not_failed(code):
    assert ended_as_requested(code, None, ASKED_S, is_first=True)
    assert ended_as_requested(code, None, ASKED_S, is_first=False)


def test_one_that_crashed_after_another_failed_has_failed_too():
    assert not ended_as_requested(-signal.SIGSEGV, None, ASKED_S, is_first=False)
