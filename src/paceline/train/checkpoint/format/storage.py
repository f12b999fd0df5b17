"""Storage for checkpoints: the protocols for local directories and object stores, their errors, and progress reports.

Names are paths relative to the storage; "" denotes the storage itself. Error messages contain the file, the rank, the
progress and a remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.errors import CheckpointError


class OutputFile(Protocol):
    """A file that is being written."""

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends bytes."""

    def commit(self) -> None:
        """Makes all written bytes durable. Nothing may be written afterward."""

    def close(self) -> None:
        """Closes the file, committed or not. Idempotent."""


class InputFile(Protocol):
    """A file that is being read."""

    def size(self) -> int:
        """Returns the file's size in bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills a buffer from an offset; returns the number of bytes read, less than requested only at end of file."""

    def close(self) -> None:
        """Closes the file. Idempotent."""


class SharedLock(Protocol):
    """Protects a directory from removal until this object is closed."""

    def close(self) -> None:
        """Removes the protection. Idempotent."""


class StorageLocation(Protocol):
    """A location in which checkpoints are stored. Its methods, and those of the protocols below, may raise OSError."""

    def describe(self, name: str = "") -> str:
        """Returns the full path or address of a name, for error messages."""

    def free_nbytes(self) -> int | None:
        """Returns the number of bytes that can still be written, or None if the number is unknown."""


class ReadableStorage(StorageLocation, Protocol):
    """The operations needed to read a checkpoint."""

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes, or None if it does not exist."""

    def open(self, name: str) -> InputFile:
        """Opens a file for reading."""

    def share(self, directory: str) -> SharedLock | None:
        """Protects a checkpoint from removal while it is being read; returns None if the storage has no locks."""


class WritableStorage(StorageLocation, Protocol):
    """The operations needed to write a rank's part."""

    def create(self, name: str) -> OutputFile:
        """Creates a file. Fails if it exists, except on object stores, where `commit` replaces it."""

    def sync_directory(self, name: str) -> None:
        """Makes the entries of a directory durable."""


class Storage(ReadableStorage, WritableStorage, Protocol):
    """All operations on a root.

    If `renames` is set, a checkpoint is made visible by renaming its directory, and otherwise by writing its manifest
    last.
    """

    renames: bool

    def names(self) -> list[str]:
        """Returns the names of files and directories in the storage, or [] if it does not exist."""

    def make_directory(self, name: str) -> None:
        """Creates a directory and its parents, if they do not exist, and makes them durable."""

    def rename(self, old: str, new: str) -> None:
        """Renames a file or directory atomically. An existing file with the new name is replaced."""

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with its contents, if it exists."""

    def is_held(self, directory: str) -> bool:
        """Returns True if a live process is writing or reading this directory."""


_ADVICE = {
    errno.ENOSPC: "Free some space there, keep fewer checkpoints (keep=), or save somewhere else",
    errno.EDQUOT: "Free some of your quota there, keep fewer checkpoints (keep=), or save somewhere else",
    errno.EROFS: "The file system is mounted read-only; save somewhere else, or remount it for writing",
    errno.EACCES: "Grant this user write permission there, or save somewhere else",
    errno.EPERM: "Grant this user write permission there, or save somewhere else",
    errno.EIO: "The disk or its connection is failing; look at the kernel's log (dmesg), and save somewhere else",
    errno.ENOENT: "The ranks were given different directories, or something removed this one while it was used; make "
    "sure that all ranks use the same one, and that only one job saves there",
    errno.ESTALE: "The server of the file system no longer has it; remount the file system",
    errno.ENOTDIR: "A file has the name that a directory should have; save somewhere else, or move the file",
    errno.EEXIST: "Something else created that file; make sure that only one job saves there",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
}
_PROGRESS_EVERY_S = 5.0
_SHORT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


def who(rank: int | None = None) -> str:
    """Returns the name of this process for error messages."""
    process = f"{socket.gethostname()}, pid {os.getpid()}"
    return f"this process ({process})" if rank is None else f"rank {rank} ({process})"


def size_text(nbytes: int) -> str:
    """Formats a size in bytes with a unit, for error messages."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def storage_error(
    what: str, storage: StorageLocation, name: str, error: OSError, *, rank: int | None = None, progress: str = ""
) -> CheckpointError:
    """Returns the error for an operation that failed with an OSError.

    Args:
        what: the operation, such as "write", "make" or "read".
        progress: the progress before the error, or "".
    """
    code = error.errno or 0
    reason = os.strerror(code) if code else str(error)
    room = ""
    if code in _SHORT_OF_SPACE and (free := _free(storage)) is not None:
        room = f" ({size_text(free)} are free)"
    advice = _ADVICE.get(code, "Make sure that the location exists and is accessible from this host")
    how_far = f", {progress}" if progress else ""
    return CheckpointError(
        f"{who(rank)} could not {what} {storage.describe(name)}: {reason}{room}{how_far}. {advice}. Checkpoints that "
        "were complete before are untouched"
        if what != "read"
        else f"{who(rank)} could not read {storage.describe(name)}: {reason}{how_far}. {advice}"
    )


def fault_of_size(storage: ReadableStorage, name: str, expected: int) -> str | None:
    """Returns the reason why a file does not have the expected size in bytes, or None if it does."""
    nbytes = storage.size(name)
    if nbytes == expected:
        return None
    seen = "is missing" if nbytes is None else f"has {nbytes:,} bytes instead of {expected:,}"
    return f"{storage.describe(name)} {seen}"


def _free(storage: StorageLocation) -> int | None:
    try:
        return storage.free_nbytes()
    except OSError:
        return None


def check_room(storage: StorageLocation, nbytes: int, rank: int | None = None) -> None:
    """Raises CheckpointError if the storage has less than `nbytes` bytes of free space, as far as that is known."""
    free = _free(storage)
    if free is not None and free < nbytes:
        raise CheckpointError(
            f"{who(rank)} would need {size_text(nbytes)} for a checkpoint in {storage.describe()}, where "
            f"{size_text(free)} are free; a new one is complete before an old one is removed. Free some space there, "
            "keep fewer checkpoints (keep=), or save somewhere else"
        )


class ProgressPrinter:
    """Prints the progress of a read or write to stderr every five seconds. Short operations print nothing."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Initializes the printer. `what` begins each line, as in "paceline: rank 0: checkpoint step_42: wrote"."""
        self._what, self._clock = what, clock
        self._began = self._printed = clock()

    def __call__(self, done: int, total: int) -> None:
        """Prints the completed and the total number of bytes, at most once every five seconds."""
        now = self._clock()
        if now - self._printed < _PROGRESS_EVERY_S:
            return
        self._printed = now
        rate = done / (now - self._began)
        left = f", {(total - done) / rate:.0f} s to go" if rate and done < total else ""
        share = 100 * done // total if total else 100
        print(
            f"{self._what} {size_text(done)} of {size_text(total)} ({share}%, {size_text(int(rate))}/s{left})",
            file=sys.stderr,
            flush=True,
        )


class FsspecStorage:
    """Storage without renames at an address such as s3://bucket/run, gs://bucket/run or memory://run.

    It works with object stores and other systems that fsspec supports. The manifest is written after all other files. A
    directory is therefore complete if it has a manifest, and otherwise unfinished. A digest in the manifest reveals
    whether the manifest itself is truncated.
    """

    renames = False

    def __init__(self, address: str) -> None:
        """Opens the file system of an address, with settings that fsspec reads from the environment."""
        try:
            from fsspec.core import url_to_fs

            self._system, self._path = url_to_fs(address)
        except ImportError as error:
            raise CheckpointError(
                f"{address} needs packages that are not installed: pip install 'paceline[fsspec]', and what fsspec "
                f"needs for this kind of address ({error})"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{address} is not an address that fsspec supports: {error}") from error
        self._address = address.rstrip("/")

    def describe(self, name: str = "") -> str:
        """Returns the full address of a name."""
        return f"{self._address}/{name}" if name else self._address

    def _full(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}" if name else self._path

    def names(self) -> list[str]:
        """Returns the names at the address, or [] if it does not exist."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes, or None if it does not exist."""
        self._system.invalidate_cache()
        try:
            info = self._system.info(self._full(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def make_directory(self, name: str) -> None:
        """Creates a directory if the store has directories."""
        self._system.makedirs(self._full(name), exist_ok=True)

    def create(self, name: str) -> _FsspecOutput:
        """Creates a file, which becomes visible at `commit` and replaces an existing file with this name."""
        return _FsspecOutput(self._system.open(self._full(name), "wb"))

    def open(self, name: str) -> _FsspecInput:
        """Opens a file for reading."""
        return _FsspecInput(self._system.open(self._full(name), "rb"))

    def sync_directory(self, name: str) -> None:
        """Does nothing, because files that a store has accepted are durable."""

    def rename(self, old: str, new: str) -> None:
        """Raises OSError."""
        raise OSError(f"{self.describe(old)} cannot be renamed at once")

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with its contents."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._full(name), recursive=True)

    def free_nbytes(self) -> int | None:
        """Returns None, because stores do not report free space."""
        return None

    def share(self, directory: str) -> None:
        """Does nothing, because stores have no locks."""

    def is_held(self, directory: str) -> bool:
        """Returns False, because stores have no locks."""
        return False


class _FsspecOutput:
    def __init__(self, file: Any) -> None:
        self._file = file
        self._is_committed = False

    def write(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._file.write(view)

    def commit(self) -> None:
        self._file.close()
        self._is_committed = True

    def close(self) -> None:
        """Discards an uncommitted file, because closing it would publish it."""
        if not self._is_committed:
            self._is_committed = True
            discard = getattr(self._file, "discard", None)
            if discard is not None:
                discard()


class _FsspecInput:
    def __init__(self, file: Any) -> None:
        self._file = file

    def size(self) -> int:
        return int(self._file.size)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._file.seek(offset)
        done = 0
        while done < len(buffer):
            data = self._file.read(len(buffer) - done)
            if not data:
                break
            buffer[done : done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        self._file.close()
