"""Signals to the launcher, as bytes on a pipe that its loop reads."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence


class Signals:
    """Catches `numbers` until closed; one that is ignored already, as SIGHUP under nohup, stays so.

    Args:
        numbers: signals that end the job.
        others: signals that the loop is to hear of beside them.
    """

    def __init__(self, numbers: Sequence[signal.Signals], others: Sequence[signal.Signals] = ()) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._caught = {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
        self.has_come = False  # known at once, also while the loop is held up
        self._before = {number: signal.signal(number, self._come) for number in self._caught}
        for number in others:
            if number not in self._before and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _come(self, *_: object) -> None:
        self.has_come = True

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._reading

    def read(self) -> tuple[list[signal.Signals], set[signal.Signals]]:
        """The signals that have come: those that end the job in their order, and which others."""
        try:
            numbers = os.read(self._reading, 256)
        except BlockingIOError:
            numbers = b""
        come = [signal.Signals(number) for number in numbers]
        return [number for number in come if number in self._caught], {*come} - self._caught

    def stop_here(self, number: signal.Signals) -> None:
        """Does what `number` (SIGTSTP, SIGTTIN) does by default: returns when the process was continued."""
        caught = signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, caught)

    def close(self) -> None:
        """Restores what was before."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reading)
        os.close(self._writing)
