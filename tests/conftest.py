"""The fixtures: `ranks(4)(fn)` runs a function on four processes, `hosts(2, 2)(fn)` on two hosts with two each."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator

import pytest
from hosts.fixture import Hosts, skip_where_not_permitted
from launching import script
from sampling import use_profile
from world import RankFailed, Ranks, World, close_worlds

__all__ = ["Hosts", "RankFailed", "Ranks", "World", "script"]


@pytest.fixture
def ranks() -> Iterator[type[Ranks]]:
    yield Ranks
    close_worlds()


@pytest.fixture
def hosts() -> Iterator[type[Hosts]]:
    skip_where_not_permitted()
    yield Hosts
    close_worlds()


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs as outside of a job, whatever started it."""
    for name in ("PACELINE_SECRET", "PACELINE_SECRET_FD", "PACELINE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """For simulations that are full of cycles, and short."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


# Files are handed to the workers of pytest-xdist in order: one that takes minutes must not begin as the last.
LONG = (
    "test_coordinator_schedules.py",
    "test_failpoints.py",
    "test_batches.py",
    "test_schedules.py",
    "test_failover.py",
)


def pytest_collection_finish() -> None:
    """What was imported stays, so the collector need not look through it again with each test's garbage."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "torch" in sys.modules:  # threads of several test files that compute at once would wait for each other's cores
        sys.modules["torch"].set_num_threads(1)
    items.sort(key=lambda item: item.path.name not in LONG)  # stable


def pytest_configure() -> None:
    """A run in the background ignores Ctrl-C, one under nohup SIGHUP: what the tests start must not inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    use_profile()
    gc.disable()  # until the tests' modules are imported, of which nothing is garbage
