"""Memory for a process's recording: memory kept by the launcher, a file, or memory that is lost at process exit.

`paceline run` creates a memory file (memfd) for each worker, keeps it open, and identifies it in PACELINE_RECORD_FD.
The worker opens it through the launcher's /proc/PID/fd, which the kernel permits only to processes of the same user.
Recording therefore works even if a script closes inherited descriptors, and child processes do not inherit the file.

A process without a launcher records into a file in a directory accessible only to its user, by default in /dev/shm. A
mapped file on a disk would continually be written back, and the kernel would kill the process with SIGBUS if the disk
were full. For the same reason the space for the file is reserved before the file is mapped, and no file is created if
space is short.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator

from paceline.comm.record.layout import NBYTES

VARIABLE = "PACELINE_RECORD"
HANDED_VARIABLE = "PACELINE_RECORD_FD"
DIRECTORY_VARIABLE = "PACELINE_RECORD_DIR"
SUFFIX = ".record"
MEMORY_NAME = "paceline-recording"  # the name under which launchers' memory files appear in /proc

MOST_FILES = 8
_MOST_RUNNING = 1024  # the maximum number of files from running processes: a host may have this many ranks
_LEAST_ROOM = 32  # the free space required for a recording, as a multiple of its size


def is_switched_off() -> bool:
    """Returns whether the user has disabled recordings."""
    return os.environ.get(VARIABLE, "on") == "off"


class HandedMemory:  # not a dataclass, because importing dataclasses would slow down the start of every worker
    """Address of the memory that a launcher keeps for a worker.

    Attributes:
        fd: the file's descriptor in the launcher.
        inode: the file's inode, to detect a reused descriptor number.
        maker: the launcher's process id.
    """

    def __init__(self, fd: int, inode: int, maker: int) -> None:
        self.fd = fd
        self.inode = inode
        self.maker = maker

    @classmethod
    def parse(cls, text: str) -> HandedMemory | None:
        """Parses the output of `str`; returns None for any other text."""
        try:
            return cls(*map(int, text.split(":")))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"{self.fd}:{self.inode}:{self.maker}"

    def open(self) -> int | None:
        """Returns a new descriptor of the memory, or None if it cannot be opened."""
        try:
            fd = os.open(f"/proc/{self.maker}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        status = os.fstat(fd)
        if status.st_ino == self.inode and status.st_size == NBYTES:
            return fd
        os.close(fd)
        return None


@contextlib.contextmanager
def handed_memory() -> Iterator[int | None]:
    """Yields a descriptor of the memory that a launcher keeps for this process, or None if there is no launcher."""
    handed = HandedMemory.parse(os.environ.get(HANDED_VARIABLE, ""))
    fd = None if handed is None else handed.open()
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def own_memory() -> Iterator[int]:
    """Yields a descriptor of a new file for this process, or -1 if no file could be created."""
    fd = _new_file()
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def directory_of_files() -> str:
    """Returns the directory for the recordings of processes without a launcher."""
    return os.environ.get(DIRECTORY_VARIABLE) or f"/dev/shm/paceline-{os.getuid()}"


def _new_file() -> int:
    directory = directory_of_files()
    path = os.path.join(directory, f"{time.time_ns()}-{os.getpid()}{SUFFIX}")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.lstat(directory)
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
            return -1
        _prune(directory)
        room = os.statvfs(directory)
        if room.f_bavail * room.f_frsize < _LEAST_ROOM * NBYTES:
            return -1
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    try:
        os.posix_fallocate(fd, 0, NBYTES)
    except OSError:
        os.unlink(path)
        os.close(fd)
        return -1
    return fd


def _prune(directory: str) -> None:
    """Removes the oldest files of exited processes until at most `MOST_FILES` remain, including the one to be created.

    Raises:
        FileExistsError: too many files belong to running processes.
    """
    names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
    for name in names[: max(0, len(names) - MOST_FILES + 1)]:
        pid = name.removesuffix(SUFFIX).rpartition("-")[2]
        if not (pid.isdecimal() and os.path.exists(f"/proc/{pid}")):
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the file
                os.unlink(os.path.join(directory, name))
    if len(names) >= _MOST_RUNNING:
        raise FileExistsError(directory)
