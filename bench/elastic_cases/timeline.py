"""Records of the steps that workers commit, in files that survive a SIGKILL."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_NOTE = struct.Struct("qq")  # the number of a step (negative if the step was abandoned), and the time


class Recorder:
    """Writes the records of this process, each with one system call.

    Args:
        directory: The directory to which all workers of the job write.
        slot: The slot of this worker; a replacement has the slot of the dead worker.
    """

    def __init__(self, directory: str, slot: int) -> None:
        self._file = os.open(Path(directory, f"steps-{slot}-{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._busy: Path | None = Path(directory, f"busy-{os.getpid()}")

    def committed(self, step: int) -> None:
        """Records that step number `step`, counted from 1, has changed the parameters."""
        os.write(self._file, _NOTE.pack(step, time.monotonic_ns()))
        if self._busy is not None:
            self._busy.write_text(str(time.process_time()))
            self._busy = None

    def given_up(self, step: int) -> None:
        """Records that step number `step` was computed but did not change the parameters."""
        os.write(self._file, _NOTE.pack(-step, time.monotonic_ns()))


@dataclass(frozen=True)
class Commit:
    """A step that a process committed, and the monotonic time of the commit."""

    slot: int
    pid: int
    step: int
    at_ns: int


def read(directory: Path) -> list[Commit]:
    """Returns all records in chronological order; `step` is negative for abandoned steps."""
    notes = []
    for path in directory.glob("steps-*"):
        slot, pid = map(int, path.name.split("-")[1:])
        content = path.read_bytes()
        whole = content[: len(content) // _NOTE.size * _NOTE.size]
        notes += [Commit(slot, pid, step, at_ns) for step, at_ns in _NOTE.iter_unpack(whole)]
    return sorted(notes, key=lambda note: note.at_ns)


def processor_seconds(directory: Path) -> dict[int, float]:
    """Returns the processor time, in seconds, that each process had used when it committed its first step."""
    return {int(path.name.split("-")[1]): float(path.read_text() or 0) for path in directory.glob("busy-*")}


def latest(directory: Path) -> list[Commit]:
    """Returns the latest record of each process that is still running."""
    notes = []
    for path in directory.glob("steps-*"):
        slot, pid = map(int, path.name.split("-")[1:])
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END) // _NOTE.size * _NOTE.size
            file.seek(max(0, size - _NOTE.size))
            last = file.read(_NOTE.size)
        if len(last) == _NOTE.size and is_alive(pid):
            step, at_ns = _NOTE.unpack(last)
            notes.append(Commit(slot, pid, abs(step), at_ns))
    return notes


def is_alive(pid: int) -> bool:
    """Returns True if a process is running or stopped, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
