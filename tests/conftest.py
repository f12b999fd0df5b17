"""Fixtures: `ranks(4)(fn)` runs a function on four ranks, and `hosts(2, 2)(fn)` on two hosts with two ranks each."""

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
    """Removes the secret of the job that runs the tests, if any, from the environment."""
    for name in ("PACELINE_SECRET", "PACELINE_SECRET_FD", "PACELINE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disables the garbage collector, for short simulations that create many reference cycles."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


# pytest-xdist distributes files to its workers in order, so the files that take minutes must come first.
LONG = (
    "test_coordinator_schedules.py",
    "test_failpoints.py",
    "test_batches.py",
    "test_schedules.py",
    "test_election_schedules.py",
)


def pytest_collection_finish() -> None:
    """Freezes the imported modules, so that the collector does not scan them during each test."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "torch" in sys.modules:  # threads of several test files that compute at the same time would compete for cores
        sys.modules["torch"].set_num_threads(1)
    items.sort(key=lambda item: item.path.name not in LONG)  # a stable sort


def pytest_configure() -> None:
    """Restores SIGINT and SIGHUP for the tests' subprocesses, because background jobs and nohup ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    use_profile()
    gc.disable()  # until the test modules have been imported, which creates little garbage
