"""A local or shared directory as a place for checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.checkpoint.format.direct import DirectWriter
from paceline.checkpoint.format.disk import Disk
from paceline.checkpoint.format.manifest import FILE as MANIFEST
from paceline.checkpoint.format.places import InputFile, OutputFile
from paceline.checkpoint.format.regular_files import open_regular, status_of

_MOST_TRIES = 100
_LARGE = ".safetensors"  # files that may be large
_OPENING = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # whatever somebody has put in the place of a manifest
# The manifests that this process holds, by device and inode: to open and close one would let it go.
_held_here: set[tuple[int, int]] = set()


class LocalPlace:
    """A directory of a file system that the ranks of a host, or all ranks, share."""

    renames = True

    def __init__(self, path: str | os.PathLike[str], disk: Disk | None = None) -> None:
        """Takes a path, which need not exist yet; `disk` performs what changes the file system."""
        self.path = Path(os.path.abspath(path))
        self._disk = disk or Disk()

    def describe(self, name: str = "") -> str:
        """Returns the full path of a name."""
        return str(self.path / name)

    def names(self, directory: str = "") -> list[str]:
        """Returns the names in a directory; none if it is not there."""
        try:
            return os.listdir(self.path / directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        """Returns a file's size in bytes; None if there is no such file.

        Raises:
            CheckpointDamagedError: it is a link, a pipe or something else than a regular file.
        """
        try:
            return status_of(self.path / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_directory(self, name: str) -> None:
        """Makes a directory and those above it, each of which survives the loss of power."""
        self._make(self.path / name)

    def _make(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make(path.parent)
        with contextlib.suppress(FileExistsError):  # another rank was faster
            self._disk.make_directory(path)
        self._disk.sync_directory(path.parent)

    def create(self, name: str) -> OutputFile:
        """Makes a file that is not there yet; while it is open, the directory counts as held if it is the manifest."""
        file = _Output(self._disk, self._disk.create(self.path / name), is_large=name.endswith(_LARGE))
        if Path(name).name == MANIFEST:
            file.hold()
        return file

    def open(self, name: str) -> InputFile:
        """Opens a file for reading; raises what `size` raises."""
        return _Input(open_regular(self.path / name))

    def sync_directory(self, name: str) -> None:
        """Returns when the names in a directory survive the loss of power."""
        self._disk.sync_directory(self.path / name)

    def rename(self, old: str, new: str) -> None:
        """Gives a file or directory another name at once."""
        self._disk.rename(self.path / old, self.path / new)

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with all that is in it."""
        self._remove(self.path / name)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            for inner in sorted(path.iterdir()):
                self._remove(inner)
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove_directory(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove_file(path)

    def free_nbytes(self) -> int | None:
        """Returns what the file system has left for this user."""
        path = self.path
        while not path.exists():
            path = path.parent
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def share(self, directory: str) -> _Shared:
        """Keeps a checkpoint from being removed while it is read; on a file system without locks it does nothing."""
        descriptor = os.open(self.path / directory / MANIFEST, os.O_RDONLY | _OPENING)
        for _ in range(_MOST_TRIES):  # somebody who asks whether it is held has the lock for an instant
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
        return _Shared(descriptor)

    def is_held(self, directory: str) -> bool:
        """Returns whether a live process writes or reads this directory."""
        manifest = self.path / directory / MANIFEST
        try:
            if _identity(os.lstat(manifest)) in _held_here:
                return True
            descriptor = os.open(manifest, os.O_RDWR | _OPENING)
        except OSError:
            return False
        try:
            # A writer's lock is of its process, so that what it forks does not keep it; readers may be several in one
            # process, so each has a lock of its own.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks on this file system
            return False
        finally:
            os.close(descriptor)
        return False


class _Output:
    def __init__(self, disk: Disk, descriptor: int, *, is_large: bool) -> None:
        self._disk = disk
        self._descriptor = descriptor
        self._writer = DirectWriter(disk, descriptor, is_wanted=is_large)
        self._held: tuple[int, int] | None = None

    def hold(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._held = _identity(os.fstat(self._descriptor))
        _held_here.add(self._held)

    def write(self, views: Sequence[memoryview]) -> None:
        self._writer.write([view.cast("B") for view in views if view.nbytes])

    def commit(self) -> None:
        self._writer.finish()
        self._disk.sync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            _held_here.discard(self._held or (0, 0))
            os.close(descriptor)


class _Input:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, at: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], at + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class _Shared:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
