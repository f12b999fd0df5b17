"""Tells when asynchronous calls are over, without anybody waiting for them: a thread, started on first use.

The thread waits in the core, without the interpreter lock, for the oldest call, and looks at the others in between.
Calls of one group end in the order in which they were made, so it is at once for them; a call that overtakes one of
another group is noticed within `_LONGEST_WAIT_NS`.

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

from paceline.engine.channel import Pending

_SHORTEST_WAIT_NS = 200_000
_LONGEST_WAIT_NS = 5_000_000


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

    def close(self) -> None:
        """Ends the thread; what is not over by then is not reported any more. Idempotent."""
        self._closed = True
        self._arrivals.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        _here.level = self._level
        pending: list[_Arrival] = []
        wait_ns = _SHORTEST_WAIT_NS
        while True:
            while not pending or not self._arrivals.empty():
                arrival = self._arrivals.get()
                if arrival is None:
                    return
                pending.append(arrival)
            pending[0][0].wait(wait_ns)
            over = [each for each in pending if each[0].done()]
            pending = [each for each in pending if each not in over]
            wait_ns = _SHORTEST_WAIT_NS if over else min(2 * wait_ns, _LONGEST_WAIT_NS)
            while over:
                if self._closed:
                    return
                self._tell(over.pop(0))  # and keep nothing of it: a group ends when nobody holds its calls

    def _tell(self, arrival: _Arrival) -> None:
        try:
            arrival[1]()
        except Exception:
            logging.getLogger(__name__).exception("what was to be done at the end of a call raised")


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
