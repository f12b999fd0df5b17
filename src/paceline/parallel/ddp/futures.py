"""Futures whose callbacks run on the thread that waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch

from paceline.group.work import Work

T = TypeVar("T")
S = TypeVar("S")


class DeferredFuture(Generic[T]):
    """A future that computes its value when somebody waits for it.

    Collectives that callbacks make are thereby made in the order in which the reducer waits, which is the same on every
    rank; run by whichever thread sees the end of a call first, as those of `Work.get_future` are, they could change
    places on one of them.

    It is no `torch.futures.Future`: torch waits for several of those in C++, where nothing would compute this one.
    `torch.futures.collect_all` refuses it therefore, and `collect_all` here takes it.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T
        self._error: Exception | None = None

    def __repr__(self) -> str:
        state = "computed when waited for" if self._compute is not None else "done"
        return f"<DeferredFuture, {state}; several: paceline.parallel.hooks.collect_all>"

    def done(self) -> bool:
        """Whether somebody has waited for it."""
        return self._compute is None

    def wait(self) -> T:
        """The value; computes it at the first call. What that raises is raised by every call."""
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
        """The same as `wait`: a callback may ask for the value of the future it was added to."""
        return self.wait()

    def then(self, callback: Callable[[DeferredFuture[T]], S]) -> DeferredFuture[S]:
        """A future of `callback(self)`."""
        return DeferredFuture(lambda: callback(self))


AnyFuture: TypeAlias = "torch.futures.Future[T] | DeferredFuture[T]"


def future_of(work: Work | None) -> DeferredFuture[list[torch.Tensor]]:
    """The tensors of a collective that runs."""
    if work is None:
        raise TypeError("a collective has a future only if it was called with async_op=True, on a rank of its group")
    return DeferredFuture(work.result)


def collect_all(futures: Sequence[AnyFuture[T]]) -> DeferredFuture[list[T]]:
    """A future of the futures' values; they are waited for in their order, and the first error is its own."""
    return DeferredFuture(lambda: [future.wait() for future in futures])
