"""Every operation by which a checkpoint changes a disk, one method each, so that a test can end or trace each."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.elastic.failpoints import reach

# What file systems say that write names at once and know no sync of directories, such as some of FUSE and CIFS.
_NOT_FOR_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP)
_MOST_VIEWS = 512  # of one call; the system takes at least 1,024


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

    def set_direct(self, descriptor: int, is_direct: bool) -> bool:
        """Has writes to a file go past the system's cache, or through it; returns whether they go past it."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
        except OSError:  # the file system cannot
            return False
        return is_direct

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
