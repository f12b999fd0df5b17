"""Every operation by which a checkpoint changes a disk, one method each, so that a test can end or trace each."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.elastic.failpoints import reach

# What file systems say that write names at once and know no sync of directories, such as some of FUSE and CIFS.
_NOT_FOR_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP)
_MOST_VIEWS = 512  # of one call; the system takes at least 1,024
_SYNC_FILE_RANGE_WRITE = 2


def _found_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Returns the system's function, None where there is none; what it returns says nothing that `sync` does not."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _found_sync_file_range()


class Disk:
    """The operations of a local file system. Each may raise OSError."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory, whose parent exists."""
        reach("checkpoint.make")
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Makes a file that is not there yet; returns its descriptor."""
        reach("checkpoint.create")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, views: Sequence[memoryview]) -> int:
        """Appends at least one byte of the views to a file; returns how many bytes."""
        reach("checkpoint.write")
        return os.writev(descriptor, views[:_MOST_VIEWS])

    def begin_sync(self, descriptor: int, at: int, nbytes: int) -> None:
        """Has the system begin to write bytes of a file to the disk, without waiting and without a promise.

        The system would otherwise do nothing before `sync`, and the disk would be idle until then.
        """
        if _sync_file_range is not None:
            _sync_file_range(descriptor, at, nbytes, _SYNC_FILE_RANGE_WRITE)

    def sync(self, descriptor: int) -> None:
        """Waits until a file's bytes survive the loss of power."""
        reach("checkpoint.sync")
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Waits until the names in a directory survive the loss of power."""
        reach("checkpoint.sync")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NOT_FOR_DIRECTORIES:
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file or directory another name; a file that had that name is replaced."""
        reach("checkpoint.rename")
        os.rename(old, new)

    def remove_file(self, path: Path) -> None:
        """Removes a file."""
        reach("checkpoint.remove")
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""
        reach("checkpoint.remove")
        os.rmdir(path)
