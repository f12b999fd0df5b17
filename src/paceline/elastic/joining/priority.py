"""Work of learners and donors that must not take the processor from those who train on the same machine."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

NICENESS = 10  # about a ninth of the time of a process that trains, where both want the same core
_LOWEST = 19  # that there is

T = TypeVar("T")


def be_modest() -> None:
    """Makes the priority of this thread, and of those that it starts, lower than that of the process's first thread.

    An ordinary user cannot raise it again.
    """
    with contextlib.suppress(OSError):
        niceness = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS, _LOWEST)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def at_low_priority(work: Callable[[], T]) -> T:
    """Returns what `work` returns, or raises what it raises; it runs in a thread of its own, at low priority."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        be_modest()
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
