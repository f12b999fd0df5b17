"""Store in a file that several processes open, possibly over NFS.

The file is a log of the operations that changed the store; every process replays it. Processes coordinate by locking
bytes at offsets beyond any data. A process locks the first of these bytes during an operation, and holds a shared lock
on the second one while it has the store open. A process that finds this second byte unlocked when it opens the file is
the only user and restarts the log, so a file from an earlier run is harmless. A file that does not begin like a log is
not changed, and neither is a file to which other users have access. A record that its killed writer left incomplete is
at the end of the log and is dropped. Any other damage is an error, because later records would be lost. A process with
last wills locks a byte of its own; a waiting process that finds this byte unlocked executes the wills.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline import _core
from paceline.comm.security.own_files import SharedFileError, open_own
from paceline.comm.store.store import DEFAULT_TIMEOUT, Store, StoreAnswer, StoreOp, StoreStatus
from paceline.durations import Timeout
from paceline.errors import StoreError
from paceline.linux import F_OFD_SETLK, F_OFD_SETLKW, is_out_of_descriptors

_OPERATION, _MEMBERS, _TESTATORS = 1 << 60, (1 << 60) + 1, 1 << 61  # offsets of the bytes to lock, beyond any data
_TESTATOR_BITS = 48
_MAGIC = b"paceln/f"  # the beginning of the log
_RECORD = struct.Struct("<III")  # number of bytes after the header, their CRC-32, number of fields
_HEADER_CHECK = struct.Struct("<I")  # CRC-32 of these numbers; ends the header
_HEADER_NBYTES = _RECORD.size + _HEADER_CHECK.size
_FIXED = struct.Struct("<Bq")
_LENGTH = struct.Struct("<I")
_FLOCK = struct.Struct("hhqqi4x")
_WITHOUT_EFFECT = {
    StoreOp.GET,
    StoreOp.MULTI_GET,
    StoreOp.WAIT,
    StoreOp.CHECK,
    StoreOp.COUNT,
    StoreOp.QUEUE_LENGTH,
    StoreOp.LIST_KEYS,
}
_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.02
_WILLS_PERIOD_S = 0.1


class FileStore(Store):
    """A store in the file `file_name`, for processes that share a directory. `world_size` is only informational.

    The store never removes the file. Removing it between runs is optional, because the first process of a new run
    discards the content from earlier runs. The file is created with mode 600, since anyone who can write to it can
    change the values that ranks read.

    Raises:
        ValueError: the file's directory does not exist.
        StoreError: the file is a link, belongs to another user, can be accessed by others, or was not written by a
            store.
    """

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1, timeout: Timeout = DEFAULT_TIMEOUT):
        super().__init__(timeout)
        self.path = os.fspath(file_name)
        self.world_size = world_size
        self._fd = -1
        if not Path(self.path).absolute().parent.is_dir():
            raise ValueError(f"FileStore: the directory of {self.path!r} does not exist; create it on every rank first")
        self._open()

    def _open(self) -> None:
        self._owner = os.getpid()
        self._threads = threading.Lock()  # the file's locks exclude other processes, but not other threads
        self._table = _core.StoreTable()
        self._replayed = len(_MAGIC)
        self._testator: bytes | None = None  # identifies the byte that this process locks once it has a will
        self._wills: dict[bytes, dict[bytes, bytes]] = {}  # for each process with wills, the values by key
        while self._fd < 0:
            try:
                self._fd = open_own(self.path)
            except SharedFileError as error:
                raise StoreError(f"{self}: {error}") from None
            except OSError as error:
                if is_out_of_descriptors(error):
                    raise
                raise StoreError(
                    f"{self}: process {os.getpid()} cannot open the file ({error.strerror}); choose a file in a "
                    "directory that this user can write to"
                ) from None
            with self._locked():
                if os.fstat(self._fd).st_nlink == 0:  # the file was removed after it was opened: open a new one
                    self.close()
                    continue
                self._check_content()
                if _lock(self._fd, fcntl.F_WRLCK, _MEMBERS, wait=False):
                    os.ftruncate(self._fd, 0)
                    os.pwrite(self._fd, _MAGIC, 0)
                _lock(self._fd, fcntl.F_RDLCK, _MEMBERS, wait=True)

    def _check_content(self) -> None:
        """Checks that the file is empty or was written by a store, since the store may overwrite the content."""
        beginning = os.pread(self._fd, len(_MAGIC), 0)
        if not _MAGIC.startswith(beginning):
            self.close()
            raise StoreError(
                f"{self}: the file is not a store; it begins with {beginning!r}; remove it, or choose another file"
            )

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"

    def close(self) -> None:
        """Closes the store for this process; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def _apply(self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float) -> StoreAnswer:
        if self._owner != os.getpid():  # a forked child would share its parent's locks, so it reopens the file
            self.close()
            self._open()
        if self._fd < 0:
            raise StoreError(f"{self} was closed by this process ({os.getpid()}) before {op.name.lower()}")
        if op is StoreOp.LAST_WILL:
            fields = [*fields, self._lock_will_byte()]
        deadline = time.monotonic() + timeout_s
        look_at = time.monotonic()
        pause_s = _FIRST_POLL_S
        while True:
            with self._locked():
                self._replay()
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _WILLS_PERIOD_S
                    self._carry_out_wills()
                done = self._perform(op, number, fields)
                if done is not None:
                    if op not in _WITHOUT_EFFECT and done[0] == StoreStatus.OK:
                        self._write(op, number, fields)
                    return StoreStatus(done[0]), done[1], done[2]
            if time.monotonic() >= deadline:
                return StoreStatus.TIMED_OUT, 0, self._table.missing(op, fields)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            _lock(self._fd, fcntl.F_WRLCK, _OPERATION, wait=True)
            try:
                yield
            finally:
                if self._fd >= 0:
                    _lock(self._fd, fcntl.F_UNLCK, _OPERATION, wait=True)

    def _replay(self) -> None:
        state = os.fstat(self._fd)
        if state.st_nlink == 0:
            raise StoreError(
                f"{self}: the file was removed while process {os.getpid()} used it, so ranks that open it later would "
                "not find this one; leave it in place (an old file does no harm)"
            )
        size = state.st_size
        if size < self._replayed:
            raise StoreError(
                f"{self}: the file has {size:,} bytes, and process {os.getpid()} has already read {self._replayed:,}, "
                "so another program has truncated it; end all processes that use the file, remove it, and start them "
                "again"
            )
        while self._replayed < size:
            try:
                record = _read_record(self._fd, self._replayed)
                if record is None:  # the record is incomplete: its writer was killed
                    os.ftruncate(self._fd, self._replayed)
                    return
                op, number, fields, nbytes = record
                self._perform(op, number, fields)
            except (ValueError, struct.error) as error:
                raise StoreError(
                    f"{self}: the record at byte {self._replayed:,} of the file was not written by a store of this "
                    f"version, or has changed since ({error}), so process {os.getpid()} cannot read this record and "
                    "the later ones; end all processes that use the file, remove it, and start them again"
                ) from None
            self._replayed += nbytes

    def _perform(self, op: int, number: int, fields: list[bytes]) -> tuple[int, int, list[bytes]] | None:
        if op != StoreOp.LAST_WILL:
            return self._table.apply(op, number, fields)
        key, value, testator = fields
        if not testator.isdigit() or not 0 <= int(testator) < 1 << _TESTATOR_BITS:
            raise ValueError("a last will belongs to no process")
        wills = self._wills.setdefault(testator, {})
        if number == 0:
            wills[key] = value
        else:
            wills.pop(key, None)
            if not wills:
                del self._wills[testator]
        return StoreStatus.OK, 0, []

    def _lock_will_byte(self) -> bytes:
        if self._testator is None:
            number = secrets.randbits(_TESTATOR_BITS)
            _lock(self._fd, fcntl.F_WRLCK, _TESTATORS + number, wait=True)
            self._testator = str(number).encode()
        return self._testator

    def _carry_out_wills(self) -> None:
        for testator in [key for key in self._wills if key != self._testator]:
            byte = _TESTATORS + int(testator)
            if not _lock(self._fd, fcntl.F_WRLCK, byte, wait=False):
                continue
            _lock(self._fd, fcntl.F_UNLCK, byte, wait=True)
            for key, value in dict(self._wills[testator]).items():
                for op, number, fields in (
                    (StoreOp.SET, 0, [key, value]),
                    (StoreOp.LAST_WILL, 1, [key, b"", testator]),
                ):
                    self._perform(op, number, fields)
                    self._write(op, number, fields)

    def _write(self, op: StoreOp, number: int, fields: list[bytes]) -> None:
        body = _FIXED.pack(op, number) + b"".join(_LENGTH.pack(len(field)) + field for field in fields)
        numbers = _RECORD.pack(len(body), zlib.crc32(body), len(fields))
        record = numbers + _HEADER_CHECK.pack(zlib.crc32(numbers)) + body
        written = 0
        try:
            while written < len(record):
                written += os.pwrite(self._fd, record[written:], self._replayed + written)
        except OSError as error:
            os.ftruncate(self._fd, self._replayed)
            # the table already contains the operation, which no other process will see: replay the log
            self._table, self._wills, self._replayed = _core.StoreTable(), {}, len(_MAGIC)
            raise StoreError(
                f"{self}: process {os.getpid()} cannot write {len(record):,} bytes for {op.name.lower()} "
                f"({error.strerror}), so the operation had no effect; free space on the disk, or choose another "
                "directory"
            ) from error
        self._replayed += len(record)


def _read_record(fd: int, offset: int) -> tuple[int, int, list[bytes], int] | None:
    """Returns the operation, number, fields and size of the record at an offset, or None if it is incomplete.

    An incomplete record is the beginning of a record, and the last one in the file. The header has its own checksum, so
    a damaged length is not mistaken for an incomplete record. Raises a ValueError if the record is damaged.
    """
    head = os.pread(fd, _HEADER_NBYTES, offset)
    if len(head) < _HEADER_NBYTES:
        return None
    nbytes, checksum, count = _RECORD.unpack_from(head)
    if (zlib.crc32(head[: _RECORD.size]),) != _HEADER_CHECK.unpack_from(head, _RECORD.size):
        raise ValueError("its header does not match its checksum")
    body = _read_up_to(fd, nbytes, offset + _HEADER_NBYTES)
    if len(body) < nbytes:
        return None
    if zlib.crc32(body) != checksum:
        raise ValueError(f"its {nbytes:,} bytes do not match their checksum")
    op, number = _FIXED.unpack_from(body)
    fields, start = [], _FIXED.size
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size
        if start + length > len(body):
            raise ValueError("a field ends after its record")
        fields.append(body[start : start + length])
        start += length
    return op, number, fields, _HEADER_NBYTES + nbytes


def _read_up_to(fd: int, nbytes: int, offset: int) -> bytes:
    """Reads bytes at an offset; the result is shorter than `nbytes` only at the end of the file."""
    read = bytearray()
    while len(read) < nbytes and (more := os.pread(fd, nbytes - len(read), offset + len(read))):
        read += more
    return bytes(read)


def _lock(fd: int, kind: int, byte: int, *, wait: bool) -> bool:
    """Sets an open-file-description lock. Unlike a POSIX lock, it belongs to the descriptor instead of the process."""
    request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, F_OFD_SETLKW if wait else F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True
