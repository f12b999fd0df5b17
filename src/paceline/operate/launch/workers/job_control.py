"""Job control in the launcher: signals (received as bytes on a pipe) and stdin (possibly a terminal).

One worker shares the launcher's stdin. That worker has its own session, so the kernel neither stops it when it reads in
the background nor sends it SIGINT on Ctrl-C. The launcher owns the terminal, and performs both actions itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Sequence

from paceline.linux import waits_for_stdin


class Signals:
    """Catches signals until closed. A signal that is already ignored, such as SIGHUP under nohup, stays ignored.

    `numbers` terminate the job; `others` and SIGCHLD are only reported by `read`.
    """

    def __init__(self, numbers: Sequence[signal.Signals], others: Sequence[signal.Signals] = ()) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._caught = {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
        self.has_arrived = False  # set by the signal handler, even while the event loop is busy
        self._before = {number: signal.signal(number, self._on_signal) for number in self._caught}
        for number in others:
            if number not in self._before and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _on_signal(self, *_: object) -> None:
        self.has_arrived = True

    def fileno(self) -> int:
        """Returns a descriptor that is readable after a signal has arrived."""
        return self._reading

    def read(self) -> tuple[list[signal.Signals], set[signal.Signals]]:
        """Returns the signals that have arrived: those that terminate the job (in order), and the set of all others."""
        try:
            numbers = os.read(self._reading, 256)
        except BlockingIOError:
            numbers = b""
        received = [signal.Signals(number) for number in numbers]
        return [number for number in received if number in self._caught], {*received} - self._caught

    def stop_here(self, number: signal.Signals) -> None:
        """Stops this process with signal `number` (SIGTSTP or SIGTTIN); returns when the process is resumed."""
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


Attributes = list[int | list[bytes | int]]


def _is_canonical(attributes: Attributes) -> bool:
    return bool(int(attributes[3]) & termios.ICANON)  # type: ignore[arg-type]


class Keyboard:
    """The launcher's stdin."""

    def __init__(self) -> None:
        self.path: str | None = None
        self._before: Attributes | None = None
        if os.isatty(0):
            self._before = termios.tcgetattr(0)
            with contextlib.suppress(OSError):  # the terminal is in another mount namespace
                self.path = os.ttyname(0)

    @property
    def is_terminal(self) -> bool:
        """Whether stdin is a terminal."""
        return self._before is not None

    def is_ours(self) -> bool:
        """Returns True if stdin is not a terminal, or if the launcher is in the terminal's foreground group."""
        if not self.is_terminal:
            return True
        try:
            return os.tcgetpgrp(0) == os.getpgrp()
        except OSError:  # not the controlling terminal, so no other job competes for input
            return True

    def is_read_by(self, pid: int) -> bool:
        """Returns True if process `pid`, which shares stdin, is waiting for input in a line editor or a read."""
        if self._before is None:
            return False
        attributes = self.attributes()
        edits_lines = attributes is not None and _is_canonical(self._before) and not _is_canonical(attributes)
        return edits_lines or waits_for_stdin(pid)

    def attributes(self) -> Attributes | None:
        """Returns the terminal's current attributes, or None without a terminal."""
        try:
            return termios.tcgetattr(0) if self.is_terminal else None
        except termios.error:  # the terminal was closed
            return None

    def set(self, attributes: Attributes | None) -> None:
        """Sets the terminal's attributes if this process is in the foreground."""
        if attributes is not None and self.is_ours():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, attributes)

    def restore(self) -> None:
        """Restores the terminal's attributes after a worker has exited inside a line editor without resetting them."""
        if self._before is not None and self.attributes() != self._before:
            self.set(self._before)
