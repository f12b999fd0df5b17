"""Shares a terminal: one worker draws on it, and the lines of all others appear above what it has drawn."""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline.launch.rows import Rows

_COLUMNS = 80  # assumed for a terminal that does not know its size


class Screen:
    """A terminal; `write` writes to it, and `fd` gives its size."""

    def __init__(self, write: Callable[[bytes], None], fd: int) -> None:
        self._write = write
        self._fd = fd
        self._owner: object = None
        self._rows = Rows()

    def size(self) -> tuple[int, int]:
        """Returns its columns and rows; zeros if it does not know them."""
        try:
            return os.get_terminal_size(self._fd)
        except OSError:
            return 0, 0

    def claim(self, stream: object, prefix: bytes) -> bool:
        """Returns whether `stream` may draw: it did last, or nothing is drawn. Its rows begin with `prefix`."""
        if self._owner is not stream and self._rows.is_blank:
            self._owner, self._rows = stream, Rows(prefix)
        return self._owner is stream

    def draw(self, data: bytes) -> None:
        """Shows the output, cut anywhere, of the stream that holds the claim."""
        self._write(self._rows.feed(data))
        self._rows.final()

    def above(self, lines: bytes) -> None:
        """Shows whole lines above what is drawn."""
        if self._rows.is_blank:
            self._write(lines)
        else:
            columns = self.size()[0] or _COLUMNS
            self._write(self._rows.erase(columns) + lines + self._rows.redraw(columns))

    def redraw(self) -> None:
        """Redraws what is drawn, from the row of the cursor on."""
        self._write(b"\r" + self._rows.redraw(self.size()[0] or _COLUMNS))

    def leave(self, stream: object) -> None:
        """Ends what `stream` has drawn."""
        if self._owner is stream:
            self._write(self._rows.leave())
            self._rows.end()
            self._owner = None
