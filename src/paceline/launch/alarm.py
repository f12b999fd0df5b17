"""Tells the launcher that an exception has left a worker's script. The worker may take seconds to end after that.

The alarm is a named pipe beside the workers' error files, so that workers inherit nothing. Which of them rang is in
the error files: each writes its own before it rings.
"""

from __future__ import annotations

import contextlib
import os

_NAME = "alarm"


class Alarm:
    """The launcher's end, in the directory of the error files; where there can be no pipe, nobody rings."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, _NAME)
        self._fd = -1
        with contextlib.suppress(OSError):
            os.mkfifo(self._path, 0o600)
            self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # reading alone, it would see ends

    def fileno(self) -> int | None:
        """Returns a descriptor that is readable while somebody rings; None if nobody can."""
        return self._fd if self._fd >= 0 else None

    def quiet(self) -> None:
        """Waits for the next one who rings."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 4096)

    def close(self) -> None:
        """Removes the pipe; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def ring(directory: str) -> None:
    """Rings, if somebody listens in that directory."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(directory, _NAME), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, b".")
        finally:
            os.close(fd)
