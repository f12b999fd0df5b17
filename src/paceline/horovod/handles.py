"""Handles of asynchronous calls."""

from __future__ import annotations

from typing import Generic, TypeVar

from paceline.horovod.negotiation import CallQueue, CallRequest

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """An asynchronous call, for `poll` and `synchronize`.

    Args:
        queue: the calls of the process set.
        request: the call, which is submitted.
    """

    def __init__(self, queue: CallQueue, request: CallRequest[Result]) -> None:
        self._queue = queue
        self._request = queue.submit(request)

    def is_over(self) -> bool:
        """Returns whether the call is over, whether or not it succeeded."""
        self._queue.observe(self._request)
        return self._request.future.done()

    def result(self) -> Result:
        """Waits for the call and returns its result, the same one each time."""
        return self._queue.result(self._request)


def poll(handle: Handle[Result]) -> bool:
    """Returns whether the call is over, so that `synchronize` would not wait."""
    return handle.is_over()


def synchronize(handle: Handle[Result]) -> Result:
    """Waits for an asynchronous call, and returns its result.

    Raises:
        PeerLostError, CollectiveError: the call failed.
    """
    return handle.result()
