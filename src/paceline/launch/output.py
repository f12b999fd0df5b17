"""The workers' output, line by line, each with its rank in front."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

_COLOURS = (36, 33, 35, 32, 34, 31)
_BOUNDARY = re.compile(rb"[\r\n]")
_LONGEST_LINE = 1 << 16


def prefix_of(rank: int, coloured: bool) -> bytes:
    """What stands before a line of this rank."""
    text = f"[rank {rank}] "
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m".encode() if coloured else text.encode()


class LinePrefixer:
    """Passes whole lines on to `write`; the last, unfinished one when `close` is called."""

    def __init__(self, prefix: bytes, write: Callable[[bytes], None]) -> None:
        self._prefix = prefix
        self._write = write
        self._open = b""

    def feed(self, data: bytes) -> None:
        """Takes more output, cut anywhere. A carriage return ends a line too: progress bars become lines."""
        *lines, self._open = _BOUNDARY.split(self._open + data)
        if len(self._open) > _LONGEST_LINE:
            lines.append(self._open)
            self._open = b""
        shown = b"".join(self._prefix + line + b"\n" for line in lines if line)
        if shown:
            self._write(shown)

    def close(self) -> None:
        """Passes on what is left."""
        if self._open:
            self.feed(b"\n")


def writer(fd: int) -> Callable[[bytes], None]:
    """Writes all of its argument to `fd`; gives up quietly when nobody reads it any more."""

    def write(data: bytes) -> None:
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return

    return write
