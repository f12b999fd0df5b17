"""Work of receivers and senders that must not take the processor from those who train on the same machine.

Replacements yield the processor to those that train on the same machine, until it is their turn to learn or train.

A replacement runs the script from its top, which may keep a core busy for a while. On a machine whose cores are all
busy the others would be slower by as much. The kernel lets only those undo that who have CAP_SYS_NICE (root, mostly) or
a limit RLIMIT_NICE; elsewhere nothing is changed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

NICENESS = 5  # about a third of the time of a process that trains, where both want the same core
_LOWEST = 19  # what the kernel knows
_MOST_LOOKS = 8  # at a process that starts others meanwhile


class LoweredPriorities:
    """Which processes have a lower priority than the launcher."""

    def __init__(self) -> None:
        self._own = os.getpriority(os.PRIO_PROCESS, 0)
        self._lower = min(self._own + NICENESS, _LOWEST)
        self._can_undo: bool | None = None
        self._yield: set[int] = set()

    def begin(self, pid: int) -> None:
        """Lowers the priority of a process that has just begun, if that can be undone."""
        if self._can_undo is None:
            self._can_undo = _can_undo(self._own)
        if self._can_undo:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, pid, self._lower)
                self._yield.add(pid)

    def end(self, pid: int) -> None:
        """Gives a process, with all its threads and what it has started, the launcher's priority again; idempotent."""
        if pid not in self._yield:
            return
        self._yield.discard(pid)
        for _ in range(_MOST_LOOKS):
            lowered = [each for each in _threads_below(pid) if _niceness(each) == self._lower]
            for thread in lowered:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, self._own)
            if not lowered:
                return

    def forget(self, pid: int) -> None:
        """Forgets a process that has ended."""
        self._yield.discard(pid)


def _can_undo(own: int) -> bool:
    """Tries it with a thread that does nothing else."""
    results: list[bool] = []

    def attempt() -> None:
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, own + 1)
            os.setpriority(os.PRIO_PROCESS, thread, own)
        except OSError:
            results.append(False)
        else:
            results.append(_niceness(thread) == own)

    trial = threading.Thread(target=attempt, name="paceline-priority")
    trial.start()
    trial.join()
    return results == [True]


def _threads_below(pid: int) -> Iterator[int]:
    """Yields the threads of a process, and of all that it has started."""
    with contextlib.suppress(OSError):  # it has ended
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


THREAD_NICENESS = 10  # about a ninth of the time of a process that trains, where both want the same core

T = TypeVar("T")


def lower_thread_priority() -> None:
    """Makes the priority of this thread, and of those that it starts, lower than that of the process's first thread.

    An ordinary user cannot raise it again.
    """
    with contextlib.suppress(OSError):
        niceness = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + THREAD_NICENESS, _LOWEST)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def run_at_low_priority(work: Callable[[], T]) -> T:
    """Returns what `work` returns, or raises what it raises; it runs in a thread of its own, at low priority."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        lower_thread_priority()
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline-learning")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
