"""Disables one rule of an elastic worker (see `run_without`), for tests that must detect the missing rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from paceline.train.elastic.launcher_connection import LauncherConnection
from paceline.train.elastic.protocol import View
from paceline.train.elastic.worker import vote
from paceline.train.elastic.worker.worker_membership import WorkerMembership


def run_without(rule: str, program: Callable[..., Any], *arguments: object) -> Any:
    """Runs `program(*arguments)` without a rule, or with all rules in force if the name is empty."""
    if rule:
        RULES[rule]()
    return program(*arguments)


def _forget_sums() -> None:
    """Recomputes sums that were computed before a view failed."""
    status_of = WorkerMembership._status

    def without_sums(self: WorkerMembership) -> Any:
        self._progress.mine.held.clear()
        return status_of(self)

    WorkerMembership._status = without_sums


def _take_any_view() -> None:
    """Allows a worker to reenter a view whose connections have failed."""
    await_later = LauncherConnection.await_view

    def await_any(self: LauncherConnection, _: int, accepts: Callable[[View], bool]) -> Any:
        return await_later(self, 0, accepts)

    LauncherConnection.await_view = await_any


def _go_on_alone() -> None:
    """Allows a worker that the others have dropped to continue alone."""
    enter = WorkerMembership.enter

    def enter_anyway(self: WorkerMembership, view: View) -> None:
        is_out = self._connection.name not in view.members
        enter(self, msgspec.structs.replace(view, members=(self._connection.name,)) if is_out else view)

    WorkerMembership.enter = enter_anyway


def _trust_everybody() -> None:
    """Disables the comparison of digests."""
    vote.judge = lambda *_: None


RULES = {
    "kept sums": _forget_sums,
    "generations": _take_any_view,
    "fencing": _go_on_alone,
    "digests": _trust_everybody,
}
