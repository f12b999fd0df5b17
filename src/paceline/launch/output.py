"""The workers' output: whole lines with their rank in front on the console, and as it is in files."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Sequence
from pathlib import Path

_COLOURS = (36, 33, 35, 32, 34, 31)
_BOUNDARY = re.compile(rb"[\r\n]")
_LONGEST_LINE = 1 << 16
_PATIENCE_S = 0.2

Write = Callable[[bytes], None]


def prefix_of(rank: int, coloured: bool) -> bytes:
    """What stands before a line of this rank."""
    text = f"[rank {rank}] "
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m".encode() if coloured else text.encode()


class LinePrefixer:
    """Passes whole lines on to `write`; the last, unfinished one when `close` is called."""

    def __init__(self, prefix: bytes, write: Write) -> None:
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


class LogFile:
    """A file that output is kept in. A full disk ends no job: it is said once, and no more is kept.

    Args:
        path: the file; what it holds is kept, its directory is made.
        say: tells the user a line.

    Raises:
        OSError: it cannot be made there.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise OSError(
                f"{path.parent} cannot hold the workers' output ({error.strerror}); give --log-dir a directory that "
                "can be written to"
            ) from error

    def fileno(self) -> int:
        """For a worker that writes to it itself."""
        return self._file.fileno()

    def write(self, data: bytes) -> None:
        """Writes all of `data`, unless the disk was full before."""
        try:
            while data and not self._file.closed:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.close()
            self._say(f"{self._path}: {error.strerror}; what follows is not kept there, the job goes on")

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


class Stream:
    """One stream of one worker, to its file, and in lines to the console and filtered to another file."""

    def __init__(self, file: LogFile | None, lines: Sequence[LinePrefixer]) -> None:
        self._file = file
        self._lines = lines

    def feed(self, data: bytes) -> None:
        """Takes more output, cut anywhere."""
        if self._file is not None:
            self._file.write(data)
        for each in self._lines:
            each.feed(data)

    def close(self) -> None:
        """Passes on what is left; idempotent."""
        for each in self._lines:
            each.close()
        if self._file is not None:
            self._file.close()


def only_with(words: Sequence[str], write: Write) -> Write:
    """Passes on the lines that have one of `words` in them."""
    wanted = [word.encode() for word in words]

    def filtered(lines: bytes) -> None:
        kept = [line for line in lines.splitlines(keepends=True) if any(word in line for word in wanted)]
        if kept:
            write(b"".join(kept))

    return filtered


class Console:
    """The launcher's own stdout and stderr; a reader that stopped reading cannot hold up a job that is to end.

    Args:
        hurries: whether the job is to end, asked while nobody reads.
    """

    def __init__(self, hurries: Callable[[], bool] = lambda: False) -> None:
        self._hurries = hurries
        self._unread: set[int] = set()

    def writer(self, fd: int) -> Write:
        """Writes all of its argument to `fd`; gives up quietly when nobody reads it any more."""

        def write(data: bytes) -> None:
            while data and fd not in self._unread:
                if not select.select([], [fd], [], _PATIENCE_S)[1]:
                    if self._hurries():
                        self._unread.add(fd)
                    continue
                try:
                    data = data[os.write(fd, data[: select.PIPE_BUF]) :]
                except BlockingIOError:
                    continue
                except OSError:  # the reader, or the terminal, is gone
                    self._unread.add(fd)

        return write

    def say(self, text: str) -> None:
        """A line of the launcher's own on stderr."""
        self.writer(2)(f"paceline: {text}\n".encode(errors="backslashreplace"))


def open_standard_streams() -> None:
    """Opens those of descriptors 0 to 2 that are closed; else a pipe of the launcher's would be its console."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
