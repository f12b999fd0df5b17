"""Keeps the memory that workers record into, so that it outlives them, and writes it into the job's directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline import system_calls
from paceline.observe.runs import RECORDING_FILE
from paceline.record import layout
from paceline.record.memory import HANDED_VARIABLE, MEMORY_NAME, HandedMemory, is_switched_off

# A worker must not shrink what is mapped here.
_SEALS = system_calls.F_SEAL_SEAL | system_calls.F_SEAL_SHRINK | system_calls.F_SEAL_GROW
_FAST = 1  # zlib's level
_MOST_FILES = 256  # of a job: in a long elastic one, many workers die


class KeptMemory:
    """The memory of one worker. `release` must follow when the worker has ended."""

    def __init__(self, keeper: Keeper, path: Path | None) -> None:
        self.fd = system_calls.memfd_create(MEMORY_NAME, system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING)
        os.truncate(self.fd, layout.NBYTES)
        fcntl.fcntl(self.fd, system_calls.F_ADD_SEALS, _SEALS)
        self._keeper = keeper
        self._path = path

    @property
    def variables(self) -> dict[str, str]:
        """The variable by which the worker finds the memory."""
        return {HANDED_VARIABLE: str(HandedMemory(self.fd, os.fstat(self.fd).st_ino, os.getpid()))}

    def release(self) -> None:
        """Has the recording written out, if there is one, and gives the memory back; idempotent."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if self._path is not None and os.pread(fd, 8, 0) == layout.MAGIC.to_bytes(8, "little"):
            self._keeper.write_out(fd, self._path)
        else:
            os.close(fd)


class Keeper:
    """The recordings of a job's workers on this machine."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._writer: ThreadPoolExecutor | None = None
        self._written: deque[Path] = deque()

    def new(self, attempt: int, rank: int) -> KeptMemory | None:
        """Returns memory for a worker; None if nothing is to be recorded, or there is no descriptor for it."""
        if is_switched_off():
            return None
        path = None
        if self._directory is not None:
            path = self._directory / f"attempt_{attempt}" / str(rank) / RECORDING_FILE
        try:
            return KeptMemory(self, path)
        except OSError:
            return None

    def write_out(self, fd: int, path: Path) -> None:
        """Writes the memory of a worker that has ended into a file, on a thread, and closes `fd`."""
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="paceline-recordings")
        self._writer.submit(self._write, fd, path)

    def close(self) -> None:
        """Waits until all is written; idempotent."""
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    def _write(self, fd: int, path: Path) -> None:
        try:
            with contextlib.suppress(OSError):  # a full disk must not end the job
                path.parent.mkdir(parents=True, exist_ok=True)
                written = path.with_name(f".{path.name}")
                written.write_bytes(zlib.compress(os.pread(fd, layout.NBYTES, 0), _FAST))
                written.replace(path)
                self._written.append(path)
                if len(self._written) > _MOST_FILES:
                    self._written.popleft().unlink()
        finally:
            os.close(fd)
