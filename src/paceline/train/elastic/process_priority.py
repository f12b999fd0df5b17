"""CPU priorities of elastic workers: workers that join or send state yield to those that train on the same machine.

A replacement worker runs the script from the start, which may occupy a core for some time. If all cores are busy, this
slows the training workers down. `LoweredPriorities` lowers the priority of such a process until it starts to train.
Restoring the priority requires CAP_SYS_NICE (usually root) or a sufficient RLIMIT_NICE; without either, the priority is
not lowered. `run_at_low_priority` runs a single task on a thread with lower priority, which requires no privilege.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

NICENESS = 5  # reduces the share of a contended core to about a third of a training process's share
THREAD_NICENESS = 10  # reduces the share of a contended core to about a ninth of a training process's share
_LOWEST = 19  # the highest niceness that Linux allows
_MOST_LOOKS = 8  # maximum number of passes over a process that keeps starting threads
T = TypeVar("T")


class LoweredPriorities:
    """The processes whose priority is lower than the launcher's."""

    def __init__(self) -> None:
        self._own = os.getpriority(os.PRIO_PROCESS, 0)
        self._lower = min(self._own + NICENESS, _LOWEST)
        self._can_undo: bool | None = None
        self._yield: set[int] = set()

    def begin(self, pid: int) -> None:
        """Lowers the priority of a new process if the launcher is allowed to restore it later."""
        if self._can_undo is None:
            self._can_undo = _can_undo(self._own)
        if self._can_undo:
            with contextlib.suppress(OSError):  # the process has exited
                os.setpriority(os.PRIO_PROCESS, pid, self._lower)
                self._yield.add(pid)

    def end(self, pid: int) -> None:
        """Restores the launcher's priority for a process, its threads and its descendants. Idempotent."""
        if pid not in self._yield:
            return
        self._yield.discard(pid)
        for _ in range(_MOST_LOOKS):
            lowered = [thread for thread in _threads_below(pid) if _niceness(thread) == self._lower]
            for thread in lowered:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, self._own)
            if not lowered:
                return

    def forget(self, pid: int) -> None:
        """Removes a process that has exited."""
        self._yield.discard(pid)


def _can_undo(own: int) -> bool:
    """Tests on a separate thread whether a lowered priority can be restored; returns the result."""

    def attempt() -> bool:
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, own + 1)
            os.setpriority(os.PRIO_PROCESS, thread, own)
        except OSError:
            return False
        return _niceness(thread) == own

    return _on_thread("paceline-priority", attempt)


def _threads_below(pid: int) -> Iterator[int]:
    """Yields the threads of a process and of its descendants."""
    with contextlib.suppress(OSError):  # the process has exited
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield int(thread)
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                for child in children.read().split():
                    yield from _threads_below(int(child))


def _niceness(thread: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:
        return None


def lower_thread_priority() -> None:
    """Lowers the priority of this thread, and of threads that it starts, below that of the process's main thread.

    The original priority cannot be restored without privileges.
    """
    with contextlib.suppress(OSError):
        niceness = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + THREAD_NICENESS, _LOWEST)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def run_at_low_priority(work: Callable[[], T]) -> T:
    """Runs `work` on a separate thread with low priority; returns its result or raises its exception."""

    def run() -> T:
        lower_thread_priority()
        return work()

    return _on_thread("paceline-learning", run)


def _on_thread(name: str, work: Callable[[], T]) -> T:
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return done.result()
