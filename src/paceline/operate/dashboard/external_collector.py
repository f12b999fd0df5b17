"""Looks at a running job without a page: at the recordings that its launcher keeps, by way of /proc/PID/fd.

The kernel grants that to processes of the launcher's user. Neither the launcher nor the workers notice it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from dataclasses import dataclass

from paceline.comm.record import layout
from paceline.comm.record.memory import MEMORY_NAME
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.dashboard_state import DashboardState
from paceline.operate.dashboard.event_queue import EventQueue, WorkerGone
from paceline.operate.dashboard.job_sample import JobInfo
from paceline.operate.dashboard.local_collector import LocalCollector
from paceline.operate.diagnosis.runs import JobRun, RunStatus, read_run

_LINK = f"/memfd:{MEMORY_NAME} (deleted)"
_HEAD = struct.Struct("<Q")


class OutOfReachError(Exception):
    """The job has ended, or its recordings are not for this user."""


@dataclass(frozen=True)
class _Seen:
    """A worker as its recording says: its rank and process, and where the recording was opened."""

    rank: int
    pid: int
    fd: int


class ExternalCollector:
    """Looks at the workers of one machine's launcher until `close`."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._notes = EventQueue()
        began_s = time.monotonic() - (time.time() - run.started_s)
        facts = JobInfo(run.job, " ".join(["paceline run", *run.command]), run.world_size or run.workers, began_s)
        self._lookout = LocalCollector(self._notes, facts)
        self._board = DashboardAggregator()
        self._open: dict[int, int] = {}  # descriptors of recordings, by inode
        self._seen: dict[int, _Seen] = {}

    def look(self) -> DashboardState:
        """Returns what there is to see now.

        Raises:
            OutOfReachError: the job has ended, or its recordings cannot be read.
        """
        self._find()
        self._board.take(self._lookout.look())
        return self._board.picture()

    def close(self) -> None:
        """Releases the recordings; idempotent."""
        self._lookout.close()
        self._notes.close()
        while self._open:
            os.close(self._open.popitem()[1])

    def _find(self) -> None:
        """Notes which workers have begun and which have ended."""
        kept = self._kept()
        for inode in set(self._open) - set(kept):
            os.close(self._open.pop(inode))
            self._ended(inode)
        for inode, path in kept.items():
            if inode not in self._open:
                with contextlib.suppress(OSError):  # it has just ended
                    self._open[inode] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        for inode, fd in self._open.items():
            now, known = _identity(fd), self._seen.get(inode)
            if now is None or now == known:
                continue
            if known is not None:
                self._ended(inode)
            self._seen[inode] = now
            self._notes.leave_worker(now.rank, now.pid, self._run.host, fd)

    def _kept(self) -> dict[int, str]:
        """Returns the paths by which the launcher's recordings can be opened, by their inodes."""
        directory = f"/proc/{self._run.pid}/fd"
        found: dict[int, str] = {}
        try:
            names = os.listdir(directory)
        except OSError as error:
            now = read_run(self._run.directory)
            if now is None or now.state is not RunStatus.RUNNING:
                raise OutOfReachError("the job has ended") from error
            raise OutOfReachError(
                f"the recordings of the job's launcher, process {self._run.pid}, cannot be read ({error.strerror}); "
                "only its own user may read them"
            ) from error
        for name in names:
            path = f"{directory}/{name}"
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(path) == _LINK:
                    found[os.stat(path).st_ino] = path
        return found

    def _ended(self, inode: int) -> None:
        seen = self._seen.pop(inode, None)
        if seen is not None:
            self._notes.leave(WorkerGone(seen.rank, seen.pid, "has ended"))


def _identity(fd: int) -> _Seen | None:
    """Returns whose recording this is; None while that is not known."""
    data = os.pread(fd, layout.HEADER.size, 0)
    if len(data) < layout.HEADER.size or _HEAD.unpack_from(data)[0] != layout.MAGIC:
        return None
    fields = layout.HEADER.unpack(data)
    return _Seen(fields[15], fields[14], fd) if fields[15] >= 0 else None
