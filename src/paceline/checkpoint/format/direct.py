"""Writes large files past the system's cache, which costs a copy and begins to write late.

Direct writes must begin at multiples of 4 KiB in the file and in memory. What is so already is written from where it
is, such as a copy that `staging.py` has laid out like the file; the rest is collected in a buffer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Sequence

from paceline.checkpoint.format.disk import Disk

ALIGNMENT = 4096
_BUFFER_NBYTES = 4 << 20


class DirectWriter:
    """Appends to a file, all of which is written with `finish`; where direct writes are refused, by usual ones.

    Args:
        disk: performs the writes.
        descriptor: of the file, which is empty.
        is_wanted: whether to write directly; small files need not be.
    """

    def __init__(self, disk: Disk, descriptor: int, *, is_wanted: bool = True) -> None:
        self._disk, self._descriptor = disk, descriptor
        self._is_direct = is_wanted and disk.set_direct(descriptor, True)
        self._buffer: memoryview | None = None
        self._filled = 0
        self._has_begun = False

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends bytes, which may change afterwards."""
        if not self._is_direct and not self._filled:
            self._write_out(list(views))
            return
        aligned: list[memoryview] = []  # whole blocks, to be written from where they are
        for view in views:
            if self._filled == 0 and len(view) % ALIGNMENT == 0 and _is_aligned(view, 0):
                aligned.append(view)
                continue
            self._write_out(aligned)
            aligned = []
            self._collect(view)
        self._write_out(aligned)

    def finish(self) -> None:
        """Writes what has been collected; a small file, and the rest of a block, in the usual way."""
        filled, self._filled = self._filled, 0
        if not filled:
            return
        whole = filled // ALIGNMENT * ALIGNMENT if self._is_direct and self._has_begun else 0
        self._write_out([self._memory()[:whole]])
        if self._is_direct:
            self._is_direct = self._disk.set_direct(self._descriptor, False)
        self._write_out([self._memory()[whole:filled]])

    def _collect(self, view: memoryview) -> None:
        while view:
            if self._filled and len(view) > 2 * ALIGNMENT and _is_aligned(view, self._filled):
                room = -self._filled % ALIGNMENT  # the rest of the view is aligned after that
                self._take(view[:room])
                end = room + (len(view) - room) // ALIGNMENT * ALIGNMENT
                self._flush(view[room:end])
                view = view[end:]
            elif self._filled == 0 and len(view) >= ALIGNMENT and _is_aligned(view, 0):
                whole = len(view) // ALIGNMENT * ALIGNMENT
                self._write_out([view[:whole]])
                view = view[whole:]
            else:
                part = view[: _BUFFER_NBYTES - self._filled]
                self._take(part)
                view = view[len(part) :]
                if self._filled == _BUFFER_NBYTES:
                    self._flush()

    def _take(self, part: memoryview) -> None:
        self._memory()[self._filled : self._filled + len(part)] = part
        self._filled += len(part)

    def _flush(self, *then: memoryview) -> None:
        self._write_out([self._memory()[: self._filled], *then])
        self._filled = 0

    def _memory(self) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(mmap.mmap(-1, _BUFFER_NBYTES))
        return self._buffer

    def _write_out(self, views: list[memoryview]) -> None:
        left = [view for view in views if len(view)]
        self._has_begun = self._has_begun or bool(left)
        while left:
            try:
                written = self._disk.write(self._descriptor, left)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._disk.set_direct(self._descriptor, False)  # the file system wants it otherwise
                self._is_direct = False
                continue
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]


def _is_aligned(view: memoryview, offset: int) -> bool:
    """Returns whether a view lies in memory as it would after `offset` bytes of aligned memory."""
    if view.readonly:
        return False
    return (ctypes.addressof(ctypes.c_char.from_buffer(view)) - offset) % ALIGNMENT == 0
