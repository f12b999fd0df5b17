"""Waits for MPI's non-blocking requests, so that every wait has a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.engine.adapters.serial_channel import CallTimeout, LibraryError
from paceline.engine.mpi.library import library

_AWAKE = 50
_SPINS = 2000
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


def complete(request: Any, lock: threading.Lock, deadline_ns: int, status: Any = None) -> None:
    """Waits for a request, at first by polling without a pause and later with short, growing sleeps.

    Args:
        request: the request; the library fills `status` when it is over.
        lock: the lock that is held during every call of MPI.
        deadline_ns: the time of the monotonic clock at which to give up, in nanoseconds.

    Raises:
        CallTimeout: the request was not over by then; it is still in progress.
        LibraryError: the library reported an error.
    """
    test: Callable[[Any], bool] = request.Test
    turns = 0
    pause_s = _SHORTEST_PAUSE_S
    try:
        while True:
            with lock:
                if test(status):
                    return
            turns += 1
            if turns < _AWAKE:
                continue
            if turns > _SPINS:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            elif turns % 16 == 0:
                time.sleep(0)
            if time.monotonic_ns() > deadline_ns:
                raise CallTimeout
    except library().Exception as error:
        raise LibraryError(f"MPI: {error.Get_error_string()}") from error
