"""Futures whose callbacks run on the thread that waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from paceline.group.work import Work

T = TypeVar("T")
S = TypeVar("S")


class DeferredFuture(torch.futures.Future[T]):
    """A `torch.futures.Future` that computes its value when somebody waits for it.

    Collectives that callbacks make are thereby made in the order in which the reducer waits, which is the same on every
    rank; run by whichever thread sees the end of a call first, as those of `Work.get_future` are, they could change
    places on one of them.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()
        self._compute: Callable[[], T] | None = compute

    def wait(self) -> T:
        """The value; computes it at the first call. What that raises is raised by every call."""
        compute, self._compute = self._compute, None
        if compute is not None:
            try:
                self.set_result(compute())
            except Exception as error:
                # torch annotates the error with the type of the value.
                cast("torch.futures.Future[Exception]", self).set_exception(error)
        value: T = super().wait()
        return value

    def value(self) -> T:
        """The same as `wait`: a callback may ask for the value of the future it was added to."""
        return self.wait()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        """A future of `callback(self)`."""
        return DeferredFuture(lambda: callback(self))


def future_of(work: Work | None) -> DeferredFuture[list[torch.Tensor]]:
    """The tensors of a collective that runs."""
    if work is None:
        raise TypeError("a collective has a future only if it was called with async_op=True, on a rank of its group")
    return DeferredFuture(work.result)
