"""LocalStorage: storage in local or shared directories, with direct writes and locks that prevent removal.

`Disk` has one method for each operation that modifies a disk, so that tests can interrupt or trace each operation.
`DirectWriter` writes large files without the page cache, because the cache would copy the data and delay the write.
`open_regular` opens files with untrusted names or contents. It opens only regular files, and never blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CheckpointDamagedError
from paceline.train.checkpoint.format.manifest import FILE as MANIFEST
from paceline.train.checkpoint.format.storage import FsspecStorage, InputFile, OutputFile, Storage
from paceline.train.elastic.failpoints import failpoint

# Errors from file systems that cannot sync directories, such as some FUSE and CIFS mounts. Such file systems write
# directory entries immediately.
_NOT_FOR_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP)
_MOST_VIEWS = 512  # maximum number of views in one call; Linux accepts up to 1,024
ALIGNMENT = 4096
_BUFFER_NBYTES = 4 << 20
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MOST_TRIES = 100
_LARGE = ".safetensors"  # the suffix of files that may be large
_OPENING = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # safe even if the manifest was replaced with a link or a pipe
# The manifests that this process has locked, by device and inode. Opening and closing such a file again would release
# its lock.
_held_here: set[tuple[int, int]] = set()


class LocalStorage:
    """A directory shared by the ranks on a host or by all ranks."""

    renames = True

    def __init__(self, path: str | os.PathLike[str], disk: Disk | None = None) -> None:
        """Creates the storage at a path, which need not exist yet. All changes to the file system go through `disk`."""
        self.path = Path(os.path.abspath(path))
        self._disk = disk or Disk()

    def describe(self, name: str = "") -> str:
        """Returns the full path of a name."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """Returns the names in the directory, or [] if it does not exist."""
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes, or None if it does not exist.

        Raises CheckpointDamagedError for a link, a pipe, or anything else that is not a regular file.
        """
        try:
            return status_of(self.path / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_directory(self, name: str) -> None:
        """Creates a directory and its parents, and makes them durable, so they survive a power loss."""
        self._make(self.path / name)

    def _make(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make(path.parent)
        with contextlib.suppress(FileExistsError):  # another rank has created the directory
            self._disk.make_directory(path)
        self._disk.sync_directory(path.parent)

    def create(self, name: str) -> OutputFile:
        """Creates a file, which must not exist yet. An open manifest marks its directory as in use."""
        file = _LocalOutput(self._disk, self._disk.create(self.path / name), is_large=name.endswith(_LARGE))
        if Path(name).name == MANIFEST:
            file.hold()
        return file

    def open(self, name: str) -> InputFile:
        """Opens a file for reading; raises the same errors as `size`."""
        return _LocalFile(open_regular(self.path / name))

    def sync_directory(self, name: str) -> None:
        """Makes the entries of a directory durable, so they survive a power loss."""
        self._disk.sync_directory(self.path / name)

    def rename(self, old: str, new: str) -> None:
        """Renames a file or directory atomically."""
        self._disk.rename(self.path / old, self.path / new)

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with its contents."""
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
        """Returns the number of bytes that this user can still write to the file system."""
        path = self.path
        while not path.exists():
            path = path.parent
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def share(self, directory: str) -> _LocalFile:
        """Protects a checkpoint from removal while it is being read, if the file system supports locks."""
        descriptor = os.open(self.path / directory / MANIFEST, os.O_RDONLY | _OPENING)
        for _ in range(_MOST_TRIES):  # retries, because `is_held` in another process briefly holds the lock
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
        return _LocalFile(descriptor)

    def is_held(self, directory: str) -> bool:
        """Returns True if a live process is writing or reading this directory."""
        manifest = self.path / directory / MANIFEST
        try:
            if _identity(os.lstat(manifest)) in _held_here:
                return True
            descriptor = os.open(manifest, os.O_RDWR | _OPENING)
        except OSError:
            return False
        try:
            # Writers use `lockf`, whose locks belong to the process and are not inherited by forks. Readers use
            # `flock`, which allows several readers in one process to have separate locks.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # the file system does not support locks
            return False
        finally:
            os.close(descriptor)
        return False


class _LocalOutput:
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


class _LocalFile:
    """An open descriptor, used to read a file or to hold a lock on it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class Disk:
    """The operations of a local file system. Each may raise OSError."""

    def make_directory(self, path: Path) -> None:
        """Creates a directory, whose parent must exist."""
        failpoint("checkpoint.make")
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Creates a file, which must not exist yet; returns its descriptor."""
        failpoint("checkpoint.create")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, views: Sequence[memoryview]) -> int:
        """Appends bytes from the views to a file; returns the number of bytes written, which is at least 1."""
        failpoint("checkpoint.write")
        return os.writev(descriptor, views[:_MOST_VIEWS])

    def set_direct(self, descriptor: int, is_direct: bool) -> bool:
        """Switches direct writes to a file on or off; returns whether they are on."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
        except OSError:  # the file system does not support direct writes
            return False
        return is_direct

    def sync(self, descriptor: int) -> None:
        """Makes the contents of a file durable, so they survive a power loss."""
        failpoint("checkpoint.sync")
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Makes the entries of a directory durable, so they survive a power loss."""
        failpoint("checkpoint.sync")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NOT_FOR_DIRECTORIES:
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file or directory. An existing file with the new name is replaced."""
        failpoint("checkpoint.rename")
        os.rename(old, new)

    def remove_file(self, path: Path) -> None:
        """Removes a file."""
        failpoint("checkpoint.remove")
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""
        failpoint("checkpoint.remove")
        os.rmdir(path)


class DirectWriter:
    """Appends to a file with direct writes, or with ordinary writes if the file system rejects direct writes.

    Direct writes must begin at multiples of 4 KiB in the file and in memory. Views with this alignment, such as those
    from `Staging`, whose layout matches the file, are written without another copy. All other data is collected in a
    buffer. Direct writes are unnecessary for small files (`is_wanted`).
    """

    def __init__(self, disk: Disk, descriptor: int, *, is_wanted: bool) -> None:
        self._disk, self._descriptor = disk, descriptor
        self._is_direct = is_wanted and disk.set_direct(descriptor, True)
        self._buffer: memoryview | None = None
        self._filled = 0
        self._has_begun = False

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends bytes. The memory of the views may be modified after the call returns."""
        if not self._is_direct and not self._filled:
            self._write_out(list(views))
            return
        aligned: list[memoryview] = []  # views to write without a copy
        for view in filter(len, views):
            if self._filled == 0 and len(view) % ALIGNMENT == 0 and _is_aligned(view, 0):
                aligned.append(view)
                continue
            self._write_out(aligned)
            aligned = []
            self._collect(view)
        self._write_out(aligned)

    def finish(self) -> None:
        """Writes the remaining bytes in the buffer, with ordinary writes for small files and incomplete blocks."""
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
                room = -self._filled % ALIGNMENT  # number of bytes before the aligned part of the view
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
                self._disk.set_direct(self._descriptor, False)  # the file system requires a larger alignment
                self._is_direct = False
                continue
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]


def _is_aligned(view: memoryview, offset: int) -> bool:
    """Returns True if the memory of a view begins `offset` bytes after an aligned address."""
    if view.readonly:
        return False
    return (ctypes.addressof(ctypes.c_char.from_buffer(view)) - offset) % ALIGNMENT == 0


def open_regular(path: str | os.PathLike[str], *, follows: bool = False) -> int:
    """Opens a regular file for reading; returns its descriptor. Raises the same errors as `status_of`."""
    status_of(path, follows=follows)  # checked first, because opening a device can have side effects
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _require_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def status_of(path: str | os.PathLike[str], *, follows: bool = False) -> os.stat_result:
    """Returns the status of a regular file; raises CheckpointDamagedError for anything else at the path.

    If `follows` is set, the path may be a symbolic link to a regular file, which is permitted for paths given by users.
    """
    return _require_regular(path, os.stat(path, follow_symlinks=follows))


def _require_regular(path: str | os.PathLike[str], found: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise CheckpointDamagedError(
            f"{os.fspath(path)} is {kind}, but a checkpoint consists of regular files; put the file itself there"
        )
    return found


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """Returns the storage at a path or an address such as s3://bucket/run. Addresses require `paceline[fsspec]`."""
    text = os.fspath(where)
    if "://" in text and not text.startswith("file://"):
        return FsspecStorage(text)
    return LocalStorage(text.removeprefix("file://"))
