"""Turns signals to the launcher into bytes on a pipe that its loop reads."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence


class Signals:
    """Catches `numbers` until closed; a signal that is already ignored, as SIGHUP under nohup, stays ignored.

    Args:
        numbers: signals that end the job.
        others: further signals that the loop needs to know of.
    """

    def __init__(self, numbers: Sequence[signal.Signals], others: Sequence[signal.Signals] = ()) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._caught = {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
        self.has_come = False  # set at once, even while the loop is busy
        self._before = {number: signal.signal(number, self._come) for number in self._caught}
        for number in others:
            if number not in self._before and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _come(self, *_: object) -> None:
        self.has_come = True

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a signal has come."""
        return self._reading

    def read(self) -> tuple[list[signal.Signals], set[signal.Signals]]:
        """Returns the signals that have come: those that end the job, in order, and the set of the others."""
        try:
            numbers = os.read(self._reading, 256)
        except BlockingIOError:
            numbers = b""
        come = [signal.Signals(number) for number in numbers]
        return [number for number in come if number in self._caught], {*come} - self._caught

    def stop_here(self, number: signal.Signals) -> None:
        """Stops this process as `number` (SIGTSTP, SIGTTIN) does by default; returns when it is continued."""
        caught = signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, caught)

    def close(self) -> None:
        """Restores the previous handlers."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reading)
        os.close(self._writing)
