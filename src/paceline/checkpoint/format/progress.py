"""Says how far a long write or read has come, every few seconds, and nothing of a short one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from paceline.checkpoint.format.refusals import size

_EVERY_S = 5.0


class Progress:
    """Called with the bytes done and the bytes in all; prints a line when five seconds have passed since the last."""

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes what is done, such as "checkpoint step_0000000042: rank 0 has written"."""
        self._what, self._stream, self._clock = what, stream, clock
        self._began = self._told = clock()

    def __call__(self, done: int, total: int) -> None:
        """Prints a line if it is time."""
        now = self._clock()
        if now - self._told < _EVERY_S:
            return
        self._told = now
        rate = done / (now - self._began)
        left = f", {(total - done) / rate:.0f} s to go" if rate and done < total else ""
        share = 100 * done // total if total else 100
        print(
            f"{self._what} {size(done)} of {size(total)} ({share} %, {size(int(rate))}/s{left})",
            file=self._stream or sys.stderr,
            flush=True,
        )
