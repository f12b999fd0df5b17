"""Makes the files, pipes and pseudo-terminals that workers write to."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Sequence

from paceline.launch.logs import Destination

# A pager on a worker's terminal would wait for keys that never come.
WITHOUT_PAGERS = {"PAGER": "cat", "GIT_PAGER": "cat"}
_PREFIX_COLUMNS = len("[rank 0] ")  # or "[slot 0] "


class Output:
    """The target of one stream of a worker: a file, or a pipe or pseudo-terminal whose data we pass on to `stream`."""

    def __init__(self, destination: Destination) -> None:
        self._file = destination.file
        self._screen = destination.screen
        self.stream = destination.stream
        self.reading = -1
        if self._file is not None:
            self.writing = self._file.fileno()
            return
        try:
            self.reading, self.writing = os.pipe() if self._screen is None else _open_terminal()
        except OSError:
            if self._screen is None:
                raise
            self._screen = None  # there are no pseudo-terminals here
            self.reading, self.writing = os.pipe()
        self.resize()

    @property
    def is_terminal(self) -> bool:
        """Whether the worker writes to a pseudo-terminal."""
        return self._screen is not None

    def resize(self) -> None:
        """Sets the size that the worker sees to the terminal's, less the rank in front of each row."""
        if self._screen is not None:
            columns, rows = self._screen.size()
            size = struct.pack("HHHH", rows, max(0, columns - _PREFIX_COLUMNS), 0, 0)
            fcntl.ioctl(self.reading, termios.TIOCSWINSZ, size)

    def close_ours(self) -> None:
        """Closes this process's copy of what the worker writes to."""
        if self._file is not None:
            self._file.close()
        else:
            os.close(self.writing)


def outputs_of(destinations: Sequence[Destination]) -> list[Output]:
    """Returns a worker's stdout and stderr: a single pseudo-terminal if both are shown on one terminal."""
    out, err = destinations
    if out.screen is not None and out.screen is err.screen:
        return [Output(out)]
    return [Output(out), Output(err)]


def _open_terminal() -> tuple[int, int]:
    """Opens a pseudo-terminal; returns the end that we read, and the worker's, which is for writing only."""
    ours, theirs = os.openpty()
    try:
        attributes = termios.tcgetattr(theirs)
        attributes[1] &= ~termios.OPOST  # a newline arrives as one
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        writing = os.open(f"/proc/self/fd/{theirs}", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, termios.error) as error:
        os.close(ours)
        raise OSError(f"no pseudo-terminal: {error}") from error
    finally:
        os.close(theirs)
    return ours, writing
