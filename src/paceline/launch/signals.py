"""Signals to the launcher, as bytes on a pipe that its loop reads."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence


class Signals:
    """Catches `numbers` until closed; one that is ignored already, as SIGHUP under nohup, stays so."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._caught = {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
        self.has_come = False  # known at once, also while the loop is held up
        self._before = {number: signal.signal(number, self._come) for number in self._caught}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _come(self, *_: object) -> None:
        self.has_come = True

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._reading

    def read(self) -> tuple[list[signal.Signals], bool]:
        """The signals that have come, and whether a child has ended."""
        try:
            numbers = os.read(self._reading, 256)
        except BlockingIOError:
            numbers = b""
        return [signal.Signals(n) for n in numbers if n in self._caught], signal.SIGCHLD in numbers

    def close(self) -> None:
        """Restores what was before."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reading)
        os.close(self._writing)
