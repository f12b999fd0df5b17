"""Handles of asynchronous calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.group.work import Work

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """An asynchronous call, for `poll` and `synchronize`.

    Args:
        work: the call; None if it is over.
        finish: returns the result once the call is over.
    """

    def __init__(self, work: Work | None, finish: Callable[[], Result]) -> None:
        self.work = work
        self._finish = finish

    def result(self) -> Result:
        """Waits for the call and returns its result."""
        if self.work is not None:
            self.work.wait()
        return self._finish()


def poll(handle: Handle[Result]) -> bool:
    """Returns whether the call is over, so that `synchronize` would not wait."""
    return handle.work is None or handle.work.is_completed()


def synchronize(handle: Handle[Result]) -> Result:
    """Waits for an asynchronous call, and returns its result.

    Raises:
        PeerLostError, CollectiveError: the call failed.
    """
    return handle.result()
