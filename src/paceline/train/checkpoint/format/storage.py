"""What a checkpoint needs of where it is kept: a local directory, or an object store, which cannot rename.

Names are relative to the storage, with slashes; "" is the place itself.

What the errors of checkpoints say: the file, the rank, how far it got, and what to do.

Says how far a long write or read has come, every few seconds, and nothing of a short one.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from paceline.errors import CheckpointError


class OutputFile(Protocol):
    """A file that is being written."""

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends bytes."""

    def commit(self) -> None:
        """Returns when all that was written survives the loss of power; nothing may be written after that."""

    def close(self) -> None:
        """Closes the file, whatever it holds; may be called again."""


class InputFile(Protocol):
    """A file that is read."""

    def size(self) -> int:
        """Returns the file's size in bytes."""

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Fills a buffer from the byte `at` on; returns how many bytes there were, fewer only at the file's end."""

    def close(self) -> None:
        """Closes the file; may be called again."""


class Hold(Protocol):
    """Keeps a directory from being taken for abandoned, or from being removed, until it is closed."""

    def close(self) -> None:
        """Lets go; may be called again."""


class Described(Protocol):
    """Where something is, for messages. Each method may raise OSError."""

    def describe(self, name: str = "") -> str:
        """Returns the full path or address of a name, for messages."""

    def free_nbytes(self) -> int | None:
        """Returns how many bytes may still be written; None if that cannot be known."""


class ReadableStorage(Described, Protocol):
    """What is needed to read a checkpoint."""

    def size(self, name: str) -> int | None:
        """Returns a file's size in bytes; None if there is no such file."""

    def open(self, name: str) -> InputFile:
        """Opens a file for reading."""

    def share(self, directory: str) -> Hold:
        """Keeps a checkpoint from being removed while it is read."""


class WritableStorage(Described, Protocol):
    """What a rank needs to write its part."""

    def create(self, name: str) -> OutputFile:
        """Makes a file that is not there yet; a place that does not rename replaces one, at `commit`."""

    def sync_directory(self, name: str) -> None:
        """Returns when the names in a directory survive the loss of power."""


class Storage(ReadableStorage, WritableStorage, Protocol):
    """Where a root is kept.

    Attributes: `renames`, whether a directory appears by one rename; if not, the manifest is written last instead.
    """

    renames: bool

    def names(self, directory: str = "") -> list[str]:
        """Returns the names in a directory; none if it is not there."""

    def make_directory(self, name: str) -> None:
        """Makes a directory and those above it; it survives the loss of power. It may be there already."""

    def rename(self, old: str, new: str) -> None:
        """Gives a file or directory another name at once; a file that had that name is replaced."""

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with all that is in it; nothing if it is not there."""

    def is_held(self, directory: str) -> bool:
        """Returns whether a live process writes or reads this directory."""


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """Returns the place of a path, or of an address such as s3://bucket/run, which needs `paceline[fsspec]`."""
    text = os.fspath(where)
    if "://" in text and not text.startswith("file://"):
        from paceline.train.checkpoint.format.fsspec_storage import FsspecStorage

        return FsspecStorage(text)
    from paceline.train.checkpoint.format.local_storage import LocalStorage

    return LocalStorage(text.removeprefix("file://"))


_ADVICE = {
    errno.ENOSPC: "Free some space there, keep fewer checkpoints (keep=), or save somewhere else",
    errno.EDQUOT: "Free some of your quota there, keep fewer checkpoints (keep=), or save somewhere else",
    errno.EROFS: "The file system is mounted read-only; save somewhere else, or have it mounted for writing",
    errno.EACCES: "Give this user the right to write there, or save somewhere else",
    errno.EPERM: "Give this user the right to write there, or save somewhere else",
    errno.EIO: "The disk or its connection fails; look into the kernel's log (dmesg), and save somewhere else",
    errno.ENOENT: "The ranks were given different directories, or something removed this one while it was used; see "
    "that all ranks name the same one, and that only one job saves there",
    errno.ESTALE: "The server of the file system no longer knows it; have it mounted anew",
    errno.ENOTDIR: "A file has the name that a directory should have; save somewhere else, or move the file",
    errno.EEXIST: "Something else has made that file; see that only one job saves there",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
}
_SHORT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


def who(rank: int | None = None) -> str:
    """Returns this process's name in messages."""
    place = f"{socket.gethostname()}, pid {os.getpid()}"
    return f"this process ({place})" if rank is None else f"rank {rank} ({place})"


def size(nbytes: int) -> str:
    """Returns a size as people read it."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def storage_error(
    what: str, storage: Described, name: str, error: OSError, *, rank: int | None = None, progress: str = ""
) -> CheckpointError:
    """Returns the error for an operation that the system refused.

    Args:
        what: the verb: "write", "make", "read".
        place: where it was.
        name: of the file or directory.
        error: what the system said.
        rank: that saw it, if it is known.
        progress: how far it had got.
    """
    code = error.errno or 0
    reason = os.strerror(code) if code else str(error)
    room = ""
    if code in _SHORT_OF_SPACE and (free := _free(storage)) is not None:
        room = f" ({size(free)} are free)"
    advice = _ADVICE.get(code, "See that the place exists and can be used from this host")
    how_far = f", {progress}" if progress else ""
    return CheckpointError(
        f"{who(rank)} could not {what} {storage.describe(name)}: {reason}{room}{how_far}. {advice}. Checkpoints that "
        "were complete before are untouched"
        if what != "read"
        else f"{who(rank)} could not read {storage.describe(name)}: {reason}{how_far}. {advice}"
    )


def _free(storage: Described) -> int | None:
    try:
        return storage.free_nbytes()
    except OSError:
        return None


def check_room(storage: Described, nbytes: int, rank: int | None = None) -> None:
    """Refuses to begin what does not fit.

    Raises:
        CheckpointError: fewer than `nbytes` may be written.
    """
    free = _free(storage)
    if free is not None and free < nbytes:
        raise CheckpointError(
            f"{who(rank)} would need {size(nbytes)} for a checkpoint in {storage.describe()}, where {size(free)} are "
            "free; a new one is complete before an old one is removed. Free some space there, keep fewer checkpoints "
            "(keep=), or save somewhere else"
        )


_EVERY_S = 5.0


class ProgressPrinter:
    """Called with the bytes done and the bytes in all; prints a line when five seconds have passed since the last."""

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes what is done, such as "checkpoint step_0000000042: rank 0 has written"."""
        self._what, self._stream, self._clock = what, stream, clock
        self._began = self._told = clock()

    def __call__(self, done: int, total: int) -> None:
        """Prints a line if it is time."""
        now = self._clock()
        if now - self._told < _EVERY_S:
            return
        self._told = now
        rate = done / (now - self._began)
        left = f", {(total - done) / rate:.0f} s to go" if rate and done < total else ""
        share = 100 * done // total if total else 100
        print(
            f"{self._what} {size(done)} of {size(total)} ({share} %, {size(int(rate))}/s{left})",
            file=self._stream or sys.stderr,
            flush=True,
        )
