"""Asynchronous calls, while they run and afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

import torch

from paceline.durations import Timeout, to_nanoseconds
from paceline.engine.channel import Message, Outcome, Pending
from paceline.errors import CollectiveTimeoutError
from paceline.group.completion import FOR_EVER_NS, when_done


class Work:
    """A call that runs in the background; a call with `async_op=True` returns it.

    The call's tensors must not be used before `wait` has returned. Several threads may call the methods at once.
    """

    def __init__(
        self,
        work: Pending | None,
        name: str,
        tensors: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        to_error: Callable[[Outcome], Exception] | None = None,
        results: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._work = work
        self._name = name
        self._tensors: Sequence[torch.Tensor] = tensors  # kept alive while the core reads and writes them
        self._finish = finish
        self._to_error = to_error
        self._results = tensors if results is None else results
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._settled = work is None
        if self._settled and finish is not None:
            finish()

    def __del__(self) -> None:
        # The core still writes to the tensors that this object keeps alive.
        if not getattr(self, "_settled", True) and self._work is not None and not self._work.done():
            self._work.wait(FOR_EVER_NS)

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Waits until the call is over and its tensors are ready. Returns True.

        Args:
            timeout: how long to wait, as a timedelta or in seconds; the call itself continues and can be waited for
                again. If None, only the call's own time-out applies.

        Raises:
            CollectiveTimeoutError: `timeout` or the call's own time-out expired.
            PeerLostError, CollectiveMismatchError: as for the synchronous call.
        """
        if not self._settled:
            timeout_ns = FOR_EVER_NS if timeout is None else to_nanoseconds(timeout)
            if not self.pause(timeout_ns):
                raise CollectiveTimeoutError(
                    f"wait() timed out: {self._name} was not done after the {timeout_ns / 1e9:.1f} s that it was "
                    "given. It goes on; wait for it again, or with a longer timeout="
                )
        if self._error is not None:
            raise self._error
        return True

    def pause(self, timeout_ns: int) -> bool:
        """Waits up to `timeout_ns` nanoseconds, and returns whether the call is over by then."""
        if not self._settled:
            assert self._work is not None
            if not self._work.wait(timeout_ns):
                return False
            self._settle()
        return True

    def is_completed(self) -> bool:
        """Returns whether the call is over, whether or not it succeeded. Does not wait."""
        if not self._settled and self._work is not None and self._work.done():
            self._settle()
        return self._settled

    def is_success(self) -> bool:
        """Returns whether the call is over and succeeded. Does not wait."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Returns the error of a failed call; None while the call runs and after it succeeded."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Waits for the call, and returns the tensors that it wrote."""
        self.wait()
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of `result()`, the same one each time.

        The future completes by itself, on a thread of its own that also runs the callbacks given to `then`. If the
        call fails, `wait` and `value` of the future raise what `wait` raises here.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
        self.when_over(lambda: self._complete(future))
        return future

    def with_results(self, results: Sequence[torch.Tensor], finish: Callable[[], None] | None = None) -> Work:
        """Returns this work, with `results` as its result and `finish` as its last step.

        Only for the function that created the Work, before it is returned.
        """
        self._results = results
        if finish is not None:
            earlier = self._finish
            self._finish = finish if earlier is None else _both(earlier, finish)
            if self._settled and self._error is None:
                finish()
        return self

    def when_over(self, then: Callable[[], None]) -> None:
        """Calls `then` when the call is over: on the completion thread, or at once if it is over already."""
        if self._settled or self._work is None:
            then()
        else:
            when_done(self._work, then)

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        error = self.exception()
        if error is not None:
            failed = _Failed(error)
            future._set_unwrap_func(failed.raise_error)
            # torch annotates the error with the type of the value.
            cast("torch.futures.Future[_Failed]", future).set_result(failed)
        else:
            future.set_result(list(self._results))

    def source_rank(self) -> int:
        """Waits for a receive, and returns its sender's group rank; -1 for calls that are not receives."""
        self.wait()
        return cast(Message, self._work).source() if hasattr(self._work, "source") else -1

    _source_rank = source_rank  # torch's other name

    def synchronize(self) -> None:
        """Waits as `wait` does."""
        self.wait()

    block_current_stream = synchronize

    def _settle(self) -> None:
        with self._lock:
            if self._settled:
                return
            self._error = self._failure()
            if self._error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as error:
                    self._error = error
            self._settled = True

    def _failure(self) -> Exception | None:
        assert self._work is not None
        outcome = self._work.outcome()
        return None if outcome is None or self._to_error is None else self._to_error(outcome)


class JoinedWork(Work):
    """Several works as one, which is over when all are, and has failed when one has."""

    def __init__(self, works: Sequence[Work], name: str, results: Sequence[torch.Tensor]) -> None:
        self._works = works
        super().__init__(_All(works), name, results)

    def when_over(self, then: Callable[[], None]) -> None:
        """Calls `then` when the last of the works is over."""
        countdown = _Countdown(len(self._works), then)
        for work in self._works:
            work.when_over(countdown.step)

    def _failure(self) -> Exception | None:
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)


class _Countdown:
    """Calls `then` at the last of `steps` steps, or at once if there are none."""

    def __init__(self, steps: int, then: Callable[[], None]) -> None:
        self._left = steps
        self._then = then
        self._lock = threading.Lock()
        if steps == 0:
            then()

    def step(self) -> None:
        """Counts a step; any thread may call this."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


class _Failed:
    """The value of a failed call's future.

    Code of torch in C++ that reads a future, such as the reducer of DistributedDataParallel, pickles the value to find
    its tensors. It finds none in what `Future.set_exception` stores, and would read the first one nevertheless.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def raise_error(self, _: object) -> None:
        """Raises the error; `wait` and `value` of the future call this."""
        raise self._error

    def __reduce__(self) -> str:
        raise self._error


class _All:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout_ns: int) -> bool:
        deadline_ns = time.monotonic_ns() + timeout_ns
        return all(work.pause(deadline_ns - time.monotonic_ns()) for work in self._works)

    def outcome(self) -> None:
        return None


def ended(
    works: Sequence[Work | None],
    name: str,
    results: Sequence[torch.Tensor],
    finish: Callable[[], None] | None = None,
) -> Work | None:
    """Returns the result of a call that consists of `works`: None if all are over, which is None, or one Work."""
    running = [work for work in works if work is not None]
    if not running:
        if finish is not None:
            finish()
        return None
    work = running[0] if len(running) == 1 else JoinedWork(running, name, results)
    return work.with_results(results, finish)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both
