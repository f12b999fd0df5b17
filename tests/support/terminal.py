"""Simulates a user at a terminal: runs `paceline run` on a pseudo-terminal, types input, and reads the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from pathlib import Path

from launching import ENVIRONMENT, command, sleep_for_a_while, wait_until

_SEQUENCES = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])|\x1b.|([\r\n])|([^\x1b\r\n]+)")


def look(shown: str) -> list[str]:
    """Returns the visible rows of text, interpreting the control sequences that the launcher and workers use."""
    rows, row, column = [""], 0, 0
    for parameter, final, newline, text in _SEQUENCES.findall(shown):
        if text:
            for character in text:
                if character == "\b":
                    column = max(0, column - 1)
                elif character >= " ":
                    line = rows[row].ljust(column)
                    rows[row], column = line[:column] + character + line[column + 1 :], column + 1
        elif newline == "\r":
            column = 0
        elif newline == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif final == "A":
            row = max(0, row - int(parameter or 1))
        elif final == "K":
            rows[row] = "" if parameter == "2" else rows[row][:column]
        elif final == "J":
            rows[row] = rows[row][:column]
            del rows[row + 1 :]
    return [each.rstrip() for each in rows]


class Terminal:
    """Starts `paceline run ARGUMENTS`, or `words`, in a session with a controlling terminal; a context manager."""

    def __init__(
        self, *arguments: str, words: list[str] | None = None, columns: int = 100, term: str = "xterm"
    ) -> None:
        self.shown = ""
        self._seen = 0
        self.exit_code: int | None = None
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            words = words or command(*arguments)
            os.execvpe(words[0], words, {**ENVIRONMENT, "TERM": term, "NO_COLOR": "1", "PS1": "$ "})

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Types Ctrl-C when the processes that read the terminal are waiting for input.

        Python's line editor shows its prompt just before it starts to wait, and a signal in between takes effect only
        at the next key.
        """
        wait_until(lambda: sleep_for_a_while(*self._readers()))
        self.type("\x03")

    def _readers(self) -> list[int]:
        """Returns the processes whose stdin is the terminal."""
        terminal = os.readlink(f"/proc/{self.pid}/fd/0")
        readers = []
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(directory / "fd/0") == terminal:
                    readers.append(int(directory.name))
        return readers

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Reads until `text` appears after the text of the previous call."""
        deadline = time.monotonic() + timeout_s
        while (found := self.shown.find(text, self._seen)) < 0:
            assert self._read(deadline), f"{text!r} did not appear; what did:\n{self.shown}"
        self._seen = found + len(text)

    def press_enter_until(self, text: str, timeout_s: float = 60) -> None:
        """Presses Enter at a shell prompt until `text` appears, because the shell reports job states only then."""
        deadline = time.monotonic() + timeout_s
        while self.shown.find(text, self._seen) < 0:
            self.type("\r")
            assert self._read(deadline), f"{text!r} did not appear; what did:\n{self.shown}"
        self.wait_for(text)

    def end(self, timeout_s: float = 60) -> list[str]:
        """Reads to the end; returns the visible rows."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline):
            pass
        assert time.monotonic() < deadline, f"it did not end:\n{self.shown}"
        _, status = os.waitpid(self.pid, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        return look(self.shown)

    def edits_lines(self) -> bool:
        return not termios.tcgetattr(self._fd)[3] & termios.ICANON

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._fd, 1 << 16) if ready else b""
        except OSError:  # EIO: all processes have closed it
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
