"""Tells when asynchronous calls are over, without anybody waiting for them: a thread, started on first use.

The thread sleeps in the core, without the interpreter lock, until any call of the core's ends. A call of another engine
is looked at now and then, since nobody else tells of its end.

What is done at the end of a call may make further calls and wait for them (PowerSGD does). The thread it runs on cannot
tell that those are over, so another one does, one level deeper; most processes never have it.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable

from paceline import _core
from paceline.engine.channel import Pending

_ANNOUNCED = (_core.Work, _core.Message)
_SHORTEST_WAIT_NS = 200_000
_LONGEST_WAIT_NS = 5_000_000
FOR_EVER_NS = 1 << 62


_Arrival = tuple[Pending, Callable[[], None]]


class CompletionThread:
    """Runs what is to be done when calls are over; ended by `close`."""

    def __init__(self, level: int = 0) -> None:
        self._level = level
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-completion", daemon=True)
        self._thread.start()

    def add(self, call: Pending, when_done: Callable[[], None]) -> None:
        """Has `when_done` called, on the thread, when `call` is over."""
        self._arrivals.put((call, when_done))
        _core.announce_ending()

    def close(self) -> None:
        """Ends the thread; what is not over by then is not reported any more. Idempotent."""
        self._closed = True
        self._arrivals.put(None)
        _core.announce_ending()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        _here.level = self._level
        pending: list[_Arrival] = []
        wait_ns = _SHORTEST_WAIT_NS
        while True:
            ends = _core.endings()  # first of all: whatever comes after it ends the sleep
            if self._closed:
                return
            self._take_arrivals(pending)
            over = _take_over(pending)
            if over:
                self._tell(over)
                wait_ns = _SHORTEST_WAIT_NS
            elif all(isinstance(call, _ANNOUNCED) for call, _ in pending):
                _core.await_ending(ends, FOR_EVER_NS)
            else:
                _core.await_ending(ends, wait_ns)
                wait_ns = min(2 * wait_ns, _LONGEST_WAIT_NS)

    def _take_arrivals(self, pending: list[_Arrival]) -> None:
        """Those that have come; waits for one if nothing is pending."""
        while not pending or not self._arrivals.empty():
            arrival = self._arrivals.get()
            if arrival is None:
                return
            pending.append(arrival)

    def _tell(self, over: list[_Arrival]) -> None:
        while over and not self._closed:
            try:
                over.pop(0)[1]()  # and keep nothing of it: a group ends when nobody holds its calls
            except Exception:
                logging.getLogger(__name__).exception("what was to be done at the end of a call raised")


def _take_over(pending: list[_Arrival]) -> list[_Arrival]:
    """Takes those that are over out of `pending`, in their order."""
    over: list[_Arrival] = []
    left: list[_Arrival] = []
    for each in pending:
        (over if each[0].done() else left).append(each)
    pending[:] = left
    return over


_threads: list[CompletionThread] = []
_starting = threading.Lock()
_here = threading.local()


def when_done(call: Pending, then: Callable[[], None]) -> None:
    """Has `then` called on another thread when `call` is over."""
    level = getattr(_here, "level", -1) + 1
    with _starting:
        if level == len(_threads):
            _threads.append(CompletionThread(level))
            atexit.register(_threads[level].close)
        _threads[level].add(call, then)


def _forget_in_child() -> None:
    global _starting
    _threads.clear()
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
