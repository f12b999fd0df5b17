"""The terminal that the launcher's stdin may be, and whether a worker waits for what is typed there.

One worker has the launcher's stdin as its own. It is in a session of its own, so the kernel neither stops it when it
reads in the background nor sends it SIGINT for Ctrl-C: the launcher, which owns the terminal, does that instead.

Turns signals to the launcher into bytes on a pipe that its loop reads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Sequence
from pathlib import Path


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


_READ = {"x86_64": 0, "aarch64": 63}  # the number of the system call

Attributes = list[int | list[bytes | int]]


class Keyboard:
    """The launcher's stdin."""

    def __init__(self) -> None:
        self.path: str | None = None
        self._before: Attributes | None = None
        if os.isatty(0):
            self._before = termios.tcgetattr(0)
            try:
                self.path = os.ttyname(0)
            except OSError:  # it belongs to another mount namespace
                self.path = None

    @property
    def is_terminal(self) -> bool:
        """Whether stdin is a terminal."""
        return self._before is not None

    def is_ours(self) -> bool:
        """Returns whether typed input is for the launcher: stdin is no terminal, or we are in its foreground."""
        if not self.is_terminal:
            return True
        try:
            return os.tcgetpgrp(0) == os.getpgrp()
        except OSError:  # it is not our controlling terminal, which therefore nobody else reads
            return True

    def is_read_by(self, pid: int) -> bool:
        """Returns whether process `pid`, which has our stdin, waits for typed input, in a line editor or by a read."""
        if self._before is None:
            return False
        return self._edits_lines() or waits_for_stdin(pid)

    def _edits_lines(self) -> bool:
        attributes = self.attributes()
        assert self._before is not None
        return bool(
            attributes is not None
            and int(self._before[3]) & termios.ICANON  # type: ignore[arg-type]
            and not int(attributes[3]) & termios.ICANON  # type: ignore[arg-type]
        )

    def attributes(self) -> Attributes | None:
        """Returns the terminal's current attributes; None without a terminal."""
        try:
            return termios.tcgetattr(0) if self.is_terminal else None
        except termios.error:  # it was closed
            return None

    def set(self, attributes: Attributes | None) -> None:
        """Sets the terminal's attributes, if this process is in its foreground."""
        if attributes is not None and self.is_ours():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, attributes)

    def restore(self) -> None:
        """Restores the attributes that a worker left changed when it ended in a line editor."""
        if self._before is not None and self.attributes() != self._before:
            self.set(self._before)


def waits_for_stdin(pid: int) -> bool:
    """Returns whether process `pid` is in a read from its stdin; False if the system does not say."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return False
    return len(words) > 1 and words[0] == str(_READ.get(os.uname().machine)) and int(words[1], 16) == 0
