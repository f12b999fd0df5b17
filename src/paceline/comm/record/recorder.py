"""Recorder for this process; the recording is in memory that the launcher keeps, in a file, or in private memory.

The recorder is enabled unless PACELINE_RECORD is "off". It starts when the process creates its first group or span, and
records the process's rank, groups and exit.

`paceline run` creates a memory file (memfd) for each worker, keeps it open, and identifies it in PACELINE_RECORD_FD.
The worker opens it through the launcher's /proc/PID/fd, which the kernel permits only to processes of the same user.
Recording therefore works even if a script closes inherited descriptors, and child processes do not inherit the file.

A process without a launcher records into a file in a directory accessible only to its user, by default in /dev/shm. A
mapped file on a disk would continually be written back, and the kernel would kill the process with SIGBUS if the disk
were full. For the same reason the space for the file is reserved before the file is mapped, and no file is created if
space is short.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence

from paceline import _core
from paceline.comm.record.layout import FORMATION, NBYTES, OUTCOMES, REDUCTIONS
from paceline.errors import RendezvousError, RendezvousTimeoutError, user_file_name

VARIABLE = "PACELINE_RECORD"
HANDED_VARIABLE = "PACELINE_RECORD_FD"
DIRECTORY_VARIABLE = "PACELINE_RECORD_DIR"
SUFFIX = ".record"
MEMORY_NAME = "paceline-recording"  # the name under which launchers' memory files appear in /proc

MOST_FILES = 8
_MOST_RUNNING = 1024  # the maximum number of files from running processes: a host can have this many ranks
_LEAST_ROOM = 32  # the free space required for a recording, as a multiple of the recording's size


def is_switched_off() -> bool:
    """Returns True if the user has disabled recordings."""
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
        """Returns a new descriptor for the memory, or None if the memory cannot be opened."""
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
    """Yields a descriptor for the memory that a launcher keeps for this process, or None if there is no launcher."""
    handed = HandedMemory.parse(os.environ.get(HANDED_VARIABLE, ""))
    fd = None if handed is None else handed.open()
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def own_memory() -> Iterator[int]:
    """Yields the descriptor of this process's new file, or -1 if no file could be created."""
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


_WORKER_VARIABLE = "PACELINE_WORKER"
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_TIME_NAMESPACE_FILE = "/proc/self/ns/time"

_FORMATION_ENGINE = "formation"  # not the group's engine, so that readers do not find a second group
_CODES = {outcome: code for code, outcome in OUTCOMES.items()}

_LAST = -1  # the priority of finalizers that run after child processes have exited

_has_tried = False
_rank: int | None = None


def begin() -> None:
    """Starts the recording unless it has already started or is disabled."""
    global _has_tried
    _has_tried = True
    if _core.is_recording() or is_switched_off():
        return
    _core.set_user_file_namer(user_file_name)
    identity = (os.environ.get(_WORKER_VARIABLE, ""), socket.gethostname(), _boot_id(), _time_namespace())
    with contextlib.suppress(OSError), handed_memory() as fd:  # training continues if the recording cannot start
        if fd is not None:
            _core.begin_recording(fd, *identity)
    if not _core.is_recording():
        with contextlib.suppress(OSError), own_memory() as fd:
            _core.begin_recording(fd, *identity)
    if _core.is_recording():
        _finish_at_the_end_of_a_child()


def _finish_at_the_end_of_a_child() -> None:
    """Finishes the recording of a process started by multiprocessing, which runs its finalizers but no exit handlers.

    Python 3.13 runs exit handlers in such a process, but removes those that were registered before the fork.
    """
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util.Finalize(None, _core.finish_recording, exitpriority=_LAST)


def begin_once() -> None:
    """Starts the recording unless this process, or the process that forked it, has already tried to start it."""
    if not _has_tried:
        begin()


def identify(rank: int, world_size: int) -> None:
    """Records this process's rank and the world size."""
    global _rank
    _rank = rank
    _core.identify_recording(rank, world_size)


def identify_once(rank: int, world_size: int) -> None:
    """Records this process's rank and the world size unless they have been recorded."""
    if _rank is None:
        identify(rank, world_size)


def known_rank() -> int | None:
    """Returns this process's rank, or None if no rank has been recorded yet."""
    return _rank


def open_group(name: str, engine: str, identity: int, rank: int, ranks: Sequence[int]) -> int:
    """Records a group; returns the serial number for its calls in the recording, or 0 if recording is disabled.

    Args:
        name: the group's name; "" denotes the default group.
        engine: the name of the engine that runs its calls.
        identity: a number that is the same on all members.
        rank: this process's rank in the group.
        ranks: the members' ranks in the default group, in the order of their group ranks.
    """
    return _core.record_group(name or "default", engine, identity, rank, ranks)


def close_group(serial: int) -> None:
    """Records that a group has been closed."""
    _core.record_group_closed(serial)


@contextlib.contextmanager
def recorded_formation(name: str, identity: int, rank: int, ranks: Sequence[int]) -> Iterator[None]:
    """Records the formation of a group as a call `new_group`, so that a diagnosis finds the ranks waiting in it.

    Args:
        name, identity, rank, ranks: the group, as in `open_group`.
    """
    begin()
    serial = open_group(name, _FORMATION_ENGINE, identity, rank, ranks)
    call = _core.RecordedCall(serial, FORMATION, 0, len(REDUCTIONS), 0, 0, -1, False, -1)
    outcome = "interrupted"
    try:
        yield
        outcome = "ok"
    except RendezvousTimeoutError:
        outcome = "timed_out"
        raise
    except RendezvousError:
        outcome = "peer_lost"
        raise
    finally:
        call.end(_CODES[outcome])
        close_group(serial)


def _boot_id() -> str:
    with contextlib.suppress(OSError), open(_BOOT_FILE) as file:
        return file.read().strip()
    return ""


def _time_namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat(_TIME_NAMESPACE_FILE).st_ino
    return 0


def _forget_in_child() -> None:
    global _rank
    _rank = None


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_core.finish_recording)
