"""Futures whose callbacks run on the thread that waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch

from paceline.group.work import Work

T = TypeVar("T")
S = TypeVar("S")


class DeferredFuture(Generic[T]):
    """A future that computes its value when it is waited for.

    Callbacks may make collectives, which must be made in the same order on every rank. They run in the order in which
    the reducer waits, which is the same everywhere. Callbacks of `Work.get_future` run on the thread that sees a call
    end first, so their order could differ between ranks.

    It is not a `torch.futures.Future`: torch waits for several of those in C++, where nothing would compute this one.
    So `torch.futures.collect_all` refuses it; use `collect_all` of this module.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T
        self._error: Exception | None = None

    def __repr__(self) -> str:
        state = "computed when waited for" if self._compute is not None else "done"
        return f"<DeferredFuture, {state}; several: paceline.parallel.hooks.collect_all>"

    def done(self) -> bool:
        """Whether the value has been computed."""
        return self._compute is None

    def wait(self) -> T:
        """Returns the value, which the first call computes; an error of it is raised by every call."""
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
        """Does the same as `wait`: a callback may ask for the value of the future that it was added to."""
        return self.wait()

    def then(self, callback: Callable[[DeferredFuture[T]], S]) -> DeferredFuture[S]:
        """Returns a future of `callback(self)`."""
        return DeferredFuture(lambda: callback(self))


AnyFuture: TypeAlias = "torch.futures.Future[T] | DeferredFuture[T]"


def future_of(work: Work | None) -> DeferredFuture[list[torch.Tensor]]:
    """Returns a future of the tensors of a collective that runs."""
    if work is None:
        raise TypeError("a collective has a future only if it was called with async_op=True, on a rank of its group")
    return DeferredFuture(work.result)


def collect_all(futures: Sequence[AnyFuture[T]]) -> DeferredFuture[list[T]]:
    """Returns a future of the futures' values, which waits for them in their order; it fails with their first error."""
    return DeferredFuture(lambda: [future.wait() for future in futures])
