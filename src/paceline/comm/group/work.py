"""`Work` for asynchronous calls, the thread that reports their completion, and their events in profiles.

The completion thread starts on first use. It sleeps in the core, without holding the interpreter lock, until any call
in the core completes, and polls the calls of engines outside the core, which do not report completion. A callback may
make further calls and wait for them, as PowerSGD's callback does. While the callback runs, its thread cannot report the
completion of these calls, so a second thread reports it. Most processes never start this second thread.

In a `torch.profiler` profile a call appears under a name such as `paceline:all_reduce`, with its tensors' shapes, its
start and its end. Like PyTorch's own Python code, callers check `torch.autograd.profiler._is_profiler_enabled` before
recording anything.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import (
    AcceleratorEvent,
    current_streams,
    on_streams,
    poll_until,
    pooled_streams,
    record_current,
)
from paceline.comm.engine.channel import CallOutcome, PendingCall, PendingMessage, StreamCall
from paceline.comm.group.buffers import count_writes
from paceline.durations import Timeout, to_nanoseconds
from paceline.errors import CollectiveTimeoutError

FOR_EVER_NS = 1 << 62
_autograd: Any = torch.autograd  # untyped, because torch's stubs lack the functions used here


class Work:
    """A call in progress, returned by calls with `async_op=True`.

    The tensors of the call must not be used before `wait` has returned. The methods are thread-safe.

    For tensors on a device with streams, `wait` without a timeout does not block the thread. Instead, it makes the
    thread's current stream on the device wait for the call; every stream that uses the tensors requires its own `wait`.
    """

    def __init__(
        self,
        work: PendingCall | None,
        name: str,
        tensors: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        to_error: Callable[[CallOutcome], Exception] | None = None,
        results: Sequence[torch.Tensor] | None = None,
        written: Sequence[torch.Tensor] = (),
    ) -> None:
        self._work = work
        self._name = name
        self._tensors: Sequence[torch.Tensor] = tensors  # keeps the tensors alive while the core uses them
        self._finish = finish
        self._to_error = to_error
        self._results = tensors if results is None else results
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._written = written
        self._streams = current_streams(tensors)  # the program's streams, which `finish` must follow
        self._finished: list[AcceleratorEvent] = []  # events recorded after `finish`, one per device
        self._settled = work is None
        if self._settled:
            self._run_finish()
            self._finished = [record_current(device) for device in self._streams]

    def __del__(self) -> None:
        # The core may still write to the tensors that this object keeps alive. On a device, the tensors' memory may be
        # reused by later work on the program's streams, and any thread may release this object.
        if not getattr(self, "_settled", True) and self._work is not None and not self._work.done():
            with on_streams(self._streams):
                self._work.wait(FOR_EVER_NS)

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Waits until the call is complete and its tensors are ready. Returns True.

        Args:
            timeout: the time to wait, as a timedelta or in seconds. On expiry the call continues, and `wait` may be
                called again. If None, only the call's own timeout applies.

        Raises:
            CollectiveTimeoutError: `timeout` or the call's own timeout expired.
            PeerLostError, CollectiveMismatchError: the same as for the synchronous call.
        """
        if not self._settled or self._streams:
            timeout_ns = FOR_EVER_NS if timeout is None else to_nanoseconds(timeout)
            if not self.pause(timeout_ns):
                raise CollectiveTimeoutError(
                    f"wait() timed out: {self._name} had not completed after {timeout_ns / 1e9:.1f} s. It is still "
                    "running; wait for it again, or pass a longer timeout="
                )
        if self._error is not None:
            raise self._error
        return True

    def pause(self, timeout_ns: int) -> bool:
        """Waits like `wait`, for up to `timeout_ns` nanoseconds; returns whether the call is complete."""
        if self._work is not None and (not self._settled or self._streams):
            if not self._work.wait(timeout_ns):
                return False
            self._settle()
        for event in self._finished:
            event.order()
        return True

    def is_completed(self) -> bool:
        """Returns True if the call is complete, successfully or not, including its work on a device."""
        if self._settled and not self._streams:
            return True
        if self._work is not None:
            if not self._work.done():
                return False
            self._settle()
        return self._error is not None or all(event.done() for event in self._finished)

    def is_success(self) -> bool:
        """Returns True if the call completed successfully. Does not block."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Returns the error if the call failed, or None if it is still running or has succeeded."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Waits for the call; returns the tensors to which it has written."""
        self.wait()
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future for `result()`; every call returns the same future.

        The completion thread completes the future and runs the callbacks passed to `then`. If the call fails, the
        future's `wait` and `value` raise the same error as this object's `wait`.

        For tensors on a device, the future completes once the call is enqueued on the device's streams, as with torch's
        backends: the future's `wait` and callbacks make their streams wait for the call, and no thread waits for the
        device.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future(devices=[*self._streams] or None)
        if self._streams and self.is_enqueued():
            self._complete(future)
        else:
            self.when_over(lambda: self._complete(future))
        return future

    def is_enqueued(self) -> bool:
        """Returns True if `wait` without a timeout would return without blocking the thread. Does not block."""
        if self._work is None:
            return True
        return isinstance(self._work, StreamCall) and self._work.is_enqueued()

    def with_results(self, results: Sequence[torch.Tensor], finish: Callable[[], None] | None = None) -> Work:
        """Sets the result, adds `finish` as the last step, and returns this work.

        Only the function that creates the work may call this, before it returns the work.
        """
        self._results = results
        self._streams = {**current_streams(results), **self._streams}
        if finish is not None:
            earlier = self._finish
            self._finish = finish if earlier is None else _both(earlier, finish)
            if self._settled and self._error is None:
                finish()
                self._finished = [record_current(device) for device in self._streams]
        return self

    def when_over(self, then: Callable[[], None]) -> None:
        """Calls `then` when the call is complete: on the completion thread, or immediately if already complete."""
        if self._work is None or self.is_completed():
            then()
        else:
            when_done(self._work, then, next(iter(self._streams), None))

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            if not self._streams:
                self._set_result(future)
                return
            # The future makes its users wait for the streams that are current at this point, so these must not be the
            # program's own streams.
            with on_streams(pooled_streams(self._streams)):
                self.pause(FOR_EVER_NS)
                self._set_result(future)
        except RuntimeError as error:  # a device error, without which the future's users would wait forever
            if not future.done():
                self._set_error(future, error)

    def _set_result(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        error = self.exception()
        if error is not None:
            self._set_error(future, error)
        else:
            future.set_result(list(self._results))

    def _set_error(self, future: torch.futures.Future[list[torch.Tensor]], error: Exception) -> None:
        failed = _FailedResult(error, set_by=threading.get_ident() if self._streams else None)
        future._set_unwrap_func(failed.raise_error)
        # PyTorch's type stubs do not allow a value of this type.
        cast("torch.futures.Future[_FailedResult]", future).set_result(failed)
        failed.set_by = None

    @property
    def streams(self) -> Mapping[torch.device, Any]:
        """Returns the streams on which the program made the call, by device (excluding the CPU)."""
        return self._streams

    def source_rank(self) -> int:
        """Waits for a receive; returns the sender's group rank, or -1 for other calls."""
        self.wait()
        return cast(PendingMessage, self._work).source() if hasattr(self._work, "source") else -1

    _source_rank = source_rank  # torch uses both names

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    block_current_stream = synchronize

    def _settle(self) -> None:
        with self._lock:
            if self._error is None and (not self._settled or self._streams):
                self._error = self._failure()  # a device may report a failure late
            if self._settled:
                return
            if self._error is None:
                try:
                    self._run_finish()
                except Exception as error:
                    self._error = error
            self._settled = True

    def _run_finish(self) -> None:
        """Runs `finish` after a successful call; on devices, this work follows the call on the program's streams."""
        if self._finish is not None and self._streams and self._work is not None:
            with on_streams(self._streams):
                self._work.wait(FOR_EVER_NS)
                self._finish()
                self._finished = [record_current(device) for device in self._streams]
        elif self._finish is not None:
            self._finish()
        count_writes(self._written)

    def _failure(self) -> Exception | None:
        assert self._work is not None
        outcome = self._work.outcome()
        return None if outcome is None or self._to_error is None else self._to_error(outcome)


class StreamWork(Work):
    """The work enqueued so far on a device's current stream; `wait` blocks the thread until this work is complete."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(_UntilEvent(record_current(device)), f"the work on the current stream of {device}")


class _UntilEvent:
    def __init__(self, event: AcceleratorEvent) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.done()

    def wait(self, timeout_ns: int) -> bool:
        if timeout_ns >= FOR_EVER_NS:
            self._event.wait()
            return True
        return poll_until(self._event.done, timeout_ns)

    def outcome(self) -> None:
        return None


class JoinedWork(Work):
    """A combination of several `Work` objects. It completes when all of them are complete, and fails if any fails."""

    def __init__(self, works: Sequence[Work], name: str, results: Sequence[torch.Tensor]) -> None:
        self._works = works
        super().__init__(_All(works), name, results)
        for work in works:
            self._streams = {**work.streams, **self._streams}

    def when_over(self, then: Callable[[], None]) -> None:
        """Calls `then` when all combined `Work` objects are complete."""
        countdown = _Countdown(len(self._works), then)
        for work in self._works:
            work.when_over(countdown.step)

    def _failure(self) -> Exception | None:
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)


class _Countdown:
    """Calls `then` after `steps` steps, or immediately if `steps` is 0."""

    def __init__(self, steps: int, then: Callable[[], None]) -> None:
        self._left = steps
        self._then = then
        self._lock = threading.Lock()
        if steps == 0:
            then()

    def step(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()


class _FailedResult:
    """The value of a failed call's future.

    `Future.set_exception` is unsuitable: C++ code in torch that reads a future, such as the reducer of
    DistributedDataParallel, pickles the value to find its tensors, and accesses the first tensor even if there is none.
    """

    def __init__(self, error: Exception, set_by: int | None) -> None:
        self._error = error
        self.set_by = set_by  # the thread in which torch is searching the value for tensors

    def raise_error(self, _: object) -> None:
        """Raises the error; called by the future's `wait` and `value`."""
        raise self._error

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if self.set_by == threading.get_ident():
            return (object, ())
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

    def is_enqueued(self) -> bool:
        return all(work.is_enqueued() for work in self._works)


def join_works(
    works: Sequence[Work | None],
    name: str,
    results: Sequence[torch.Tensor],
    finish: Callable[[], None] | None = None,
) -> Work | None:
    """Combines the `Work` objects for parts of a call (None for completed parts); returns None if all are complete."""
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


_ANNOUNCED = (_core.Work, _core.Message)
_SHORTEST_WAIT_NS = 200_000
_LONGEST_WAIT_NS = 5_000_000
_Arrival = tuple[PendingCall, Callable[[], None]]


def when_done(call: PendingCall, then: Callable[[], None], device: torch.device | None = None) -> None:
    """Calls `then` on another thread when `call` is complete.

    The thread makes `device`, which the call uses, the current device before querying an event, since CUDA might
    otherwise create a context on the first GPU.
    """
    level = getattr(_here, "level", -1) + 1
    with _starting:
        if level == len(_threads):
            _threads.append(CompletionThread(level))
            atexit.register(_threads[level].close)
        _threads[level].add(call, then, device)


class CompletionThread:
    """Runs callbacks when calls complete, until `close` is called."""

    def __init__(self, level: int = 0) -> None:
        self._level = level
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._device: torch.device | None = None  # the thread's current device: the one used by the first call
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-completion", daemon=True)
        self._thread.start()

    def add(self, call: PendingCall, when_done: Callable[[], None], device: torch.device | None = None) -> None:
        """Calls `when_done` on the completion thread when `call`, which may use `device`, is complete."""
        self._device = self._device or device
        self._arrivals.put((call, when_done))
        _core.announce_completion()

    def close(self) -> None:
        """Stops the thread that reports calls; idempotent."""
        self._closed = True
        self._arrivals.put(None)
        _core.announce_completion()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        _here.level = self._level
        pending: list[_Arrival] = []
        wait_ns = _SHORTEST_WAIT_NS
        current: torch.device | None = None
        while True:
            ends = _core.completion_count()  # read first, so that no later completion is missed during the sleep
            if self._closed:
                return
            self._take_arrivals(pending)
            if current is not self._device and self._device is not None:
                current = self._device
                with contextlib.suppress(RuntimeError):  # a device error, which the calls' futures raise
                    torch.accelerator.set_device_index(current.index)
            completed = _take_completed(pending)
            if completed:
                self._run_callbacks(completed)
                wait_ns = _SHORTEST_WAIT_NS
            elif all(isinstance(call, _ANNOUNCED) for call, _ in pending):
                _core.await_completion(ends, FOR_EVER_NS)
            else:
                _core.await_completion(ends, wait_ns)
                wait_ns = min(2 * wait_ns, _LONGEST_WAIT_NS)

    def _take_arrivals(self, pending: list[_Arrival]) -> None:
        """Adds new calls to `pending`; waits for a call if `pending` is empty."""
        while not pending or not self._arrivals.empty():
            arrival = self._arrivals.get()
            if arrival is None:
                return
            pending.append(arrival)

    def _run_callbacks(self, completed: list[_Arrival]) -> None:
        while completed and not self._closed:
            try:
                completed.pop(0)[1]()  # drops the reference, which would keep the call's group alive
            except Exception:
                logging.getLogger(__name__).exception("a callback for the completion of a call raised an error")


def _take_completed(pending: list[_Arrival]) -> list[_Arrival]:
    """Removes the completed calls from `pending` and returns them in order."""
    completed: list[_Arrival] = []
    left: list[_Arrival] = []
    for arrival in pending:
        (completed if _is_over(arrival[0]) else left).append(arrival)
    pending[:] = left
    return completed


def _is_over(call: PendingCall) -> bool:
    try:
        return call.done()
    except RuntimeError:  # a device error, which the callback receives as well
        return True


_threads: list[CompletionThread] = []
_starting = threading.Lock()
_here = threading.local()

# PyTorch 2.13 records events that begin and end on different threads; 2.6 omits them.
_ENDS_ON_ANY_THREAD = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_other_thread: ThreadPoolExecutor | None = None


class ProfiledCall:
    """A call's event in the profile, from the creation of this object until `end`, which any thread may call.

    Programs identify a backend's calls in a profile by `is_async`, which torch sets on all events of its own backends.
    For an event recorded from Python, torch sets it only if the event begins and ends on different threads, so the
    event of a synchronous call is ended on another thread. In releases of PyTorch that omit such events, ordinary
    events are recorded instead. The event of an asynchronous call then ends once the call has been started.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._begun_by = threading.get_ident()
        self._record = _autograd._record_function_with_args_enter(name, *tensors)

    def end_with(self, work: Work) -> None:
        """Ends the event when the asynchronous call completes."""
        if _ENDS_ON_ANY_THREAD:
            work.when_over(self.end)
        else:
            self._exit()

    def end(self) -> None:
        """Ends the event, and returns when the event is in the profile."""
        if not _ENDS_ON_ANY_THREAD or threading.get_ident() != self._begun_by:
            self._exit()
            return
        try:
            ended = _thread().submit(self._exit)
        except RuntimeError:  # at interpreter exit, thread pools reject new work
            self._exit()
        else:
            ended.result()

    def _exit(self) -> None:
        _autograd._record_function_with_args_exit(self._record)


def _thread() -> ThreadPoolExecutor:
    """Returns the thread that ends the events of synchronous calls; starts it on first use."""
    global _other_thread
    with _starting:
        if _other_thread is None:
            _other_thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-profiling")
        return _other_thread


def _forget_threads_in_child() -> None:
    global _other_thread, _starting
    _threads.clear()
    _other_thread, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_threads_in_child)
