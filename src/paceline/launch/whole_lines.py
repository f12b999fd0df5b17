"""Keeps the lines of several processes that print into one notebook cell whole."""

from __future__ import annotations

import io
from typing import TextIO


class WholeLines(io.TextIOBase):
    """Passes text on to another stream a line at a time.

    A fork of a notebook's process sends every piece of text to the notebook at once, and `print` writes the end of a
    line as a piece of its own: what another process prints may come in between.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding

    def writable(self) -> bool:
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Passes on all lines that are complete."""
        whole, end, self._held = (self._held + text).rpartition("\n")
        if end:
            self._stream.write(whole + end)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Passes on what there is, as a progress bar wants it."""
        held, self._held = self._held, ""
        if held:
            self._stream.write(held)
        self._stream.flush()
