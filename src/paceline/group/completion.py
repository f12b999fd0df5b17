"""Reports the end of asynchronous calls that nobody waits for, from a thread that starts on first use.

The thread sleeps in the core, without the interpreter lock, until any call of the core ends. It polls the calls of
other engines, which do not report their end.

A callback may make further calls and wait for them, as PowerSGD's does. The thread that runs the callback cannot report
their end meanwhile, so a second thread, one level deeper, does. Most processes never start it.
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
    """Runs callbacks when calls are over, until `close` ends it."""

    def __init__(self, level: int = 0) -> None:
        self._level = level
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-completion", daemon=True)
        self._thread.start()

    def add(self, call: Pending, when_done: Callable[[], None]) -> None:
        """Calls `when_done` on the thread when `call` is over."""
        self._arrivals.put((call, when_done))
        _core.announce_ending()

    def close(self) -> None:
        """Ends the thread, which no longer reports calls that are not over by then. Idempotent."""
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
            ends = _core.endings()  # read first, so that every call that ends later ends the sleep
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
        """Adds the new calls to `pending`; waits for one if nothing is pending."""
        while not pending or not self._arrivals.empty():
            arrival = self._arrivals.get()
            if arrival is None:
                return
            pending.append(arrival)

    def _tell(self, over: list[_Arrival]) -> None:
        while over and not self._closed:
            try:
                over.pop(0)[1]()  # without keeping a reference: a group ends when nobody holds its calls
            except Exception:
                logging.getLogger(__name__).exception("what was to be done at the end of a call raised")


def _take_over(pending: list[_Arrival]) -> list[_Arrival]:
    """Removes the calls that are over from `pending`, and returns them in their order."""
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
    """Calls `then` on another thread when `call` is over."""
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
