"""Futures whose callbacks run on the thread that waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch

from paceline.group.work import Work

T = TypeVar("T")
S = TypeVar("S")


class DeferredFuture(Generic[T]):
    """A future that computes its value when a thread waits for it.

    Callbacks may make collectives, which must be made in the same order on every rank. The callbacks of this future run
    in the order in which the reducer waits, which is the same on every rank. Those of `Work.get_future` run in the
    order in which calls end, which may differ between ranks.

    It is not a `torch.futures.Future`, because torch waits for several of those in C++, where nothing would compute the
    value. `torch.futures.collect_all` therefore refuses it; `collect_all` of this module takes its place.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T
        self._error: Exception | None = None

    def __repr__(self) -> str:
        state = "computed when waited for" if self._compute is not None else "done"
        return f"<DeferredFuture, {state}; several: paceline.parallel.hooks.collect_all>"

    def done(self) -> bool:
        """Returns whether the value has been computed."""
        return self._compute is None

    def wait(self) -> T:
        """Returns the value, which the first call computes. If that fails, every call raises the error."""
        compute, self._compute = self._compute, None
        if compute is not None:
            try:
                self._value = compute()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._value

    def value(self) -> T:
        """Does what `wait` does, for callbacks that ask for the value of the future that they were added to."""
        return self.wait()

    def then(self, callback: Callable[[DeferredFuture[T]], S]) -> DeferredFuture[S]:
        """Returns a future of `callback(self)`."""
        return DeferredFuture(lambda: callback(self))


AnyFuture: TypeAlias = "torch.futures.Future[T] | DeferredFuture[T]"


def future_of(work: Work | None) -> DeferredFuture[list[torch.Tensor]]:
    """Returns a future of the tensors of an asynchronous collective.

    Raises:
        TypeError: `work` is None.
    """
    if work is None:
        raise TypeError("a collective has a future only if it was called with async_op=True, on a rank of its group")
    return DeferredFuture(work.result)


def collect_all(futures: Sequence[AnyFuture[T]]) -> DeferredFuture[list[T]]:
    """Returns a future of the values of `futures`; it waits for them in order, and fails with their first error."""
    return DeferredFuture(lambda: [future.wait() for future in futures])
