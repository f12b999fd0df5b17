"""Collector that runs outside the launcher and opens the launcher's recordings through /proc/PID/fd.

The kernel permits this for processes of the same user. The launcher and the workers are not affected. The job's events,
including the diagnosis of a stall, are read from the file that the launcher appends to.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.comm.record import layout
from paceline.comm.record.memory import MEMORY_NAME
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.dashboard_state import DashboardState
from paceline.operate.dashboard.event_queue import EventFormatter, EventQueue, WorkerGone
from paceline.operate.dashboard.job_sample import JobEvent, JobInfo, StallNotice
from paceline.operate.dashboard.local_collector import LocalCollector
from paceline.operate.diagnosis.runs import EVENTS_FILE, JobRun, RunStatus, read_run

_LINK = f"/memfd:{MEMORY_NAME} (deleted)"
_HEAD = struct.Struct("<Q")


class OutOfReachError(Exception):
    """Raised if the job has ended, or this user may not read its recordings."""


@dataclass(frozen=True)
class _RecordedWorker:
    """A worker's rank and process id, and a descriptor for its recording."""

    rank: int
    pid: int
    fd: int


class ExternalCollector:
    """Collects samples from the workers of one machine's launcher."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._notes = EventQueue()
        began_s = time.monotonic() - (time.time() - run.started_s)
        facts = JobInfo(run.job, " ".join(["paceline run", *run.command]), run.world_size or run.workers, began_s)
        self._collector = LocalCollector(self._notes, facts)
        self._aggregator = DashboardAggregator()
        self._open: dict[int, int] = {}  # descriptors for recordings, by the recording's inode
        self._workers: dict[int, _RecordedWorker] = {}  # workers by their recording's inode
        self._events = EventFollower(run.directory / EVENTS_FILE)

    def look(self) -> DashboardState:
        """Takes a sample and returns the current state.

        Raises:
            OutOfReachError: the job has ended, or its recordings cannot be read.
        """
        self._find()
        for note in self._events.take():
            self._notes.leave(note)
        self._aggregator.take(self._collector.look())
        return self._aggregator.state()

    def close(self) -> None:
        """Closes the recordings; idempotent."""
        self._collector.close()
        self._notes.close()
        while self._open:
            os.close(self._open.popitem()[1])

    def _find(self) -> None:
        """Detects workers that have started or exited."""
        kept = self._kept()
        for inode in set(self._open) - set(kept):
            os.close(self._open.pop(inode))
            self._ended(inode)
        for inode, path in kept.items():
            if inode not in self._open:
                with contextlib.suppress(OSError):  # the worker exited in the meantime
                    self._open[inode] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        for inode, fd in self._open.items():
            worker, known = _worker_of(fd), self._workers.get(inode)
            if worker is None or worker == known:
                continue
            if known is not None:
                self._ended(inode)
            self._workers[inode] = worker
            self._notes.leave_worker(worker.rank, worker.pid, self._run.host, fd)

    def _kept(self) -> dict[int, str]:
        """Returns the paths of the launcher's recordings in /proc, keyed by inode."""
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
            with contextlib.suppress(OSError):  # the descriptor was closed in the meantime
                if os.readlink(path) == _LINK:
                    found[os.stat(path).st_ino] = path
        return found

    def _ended(self, inode: int) -> None:
        worker = self._workers.pop(inode, None)
        if worker is not None:
            self._notes.leave(WorkerGone(worker.rank, worker.pid, None))


class EventFollower:
    """Incremental reader for the file of a launcher's events.

    Args:
        path: the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._formatter = EventFormatter()

    def take(self) -> list[JobEvent | StallNotice | None]:
        """Returns the notes for the events since the previous call: the displayed events and the latest diagnosis."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        ahead_s = time.time() - time.monotonic()
        notes: list[JobEvent | StallNotice | None] = []
        for line in data.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                facts = json.loads(line)
                kind, at_s = str(facts["event"]), float(facts["time_s"]) - ahead_s
                notes += self._formatter.tell(kind, facts, at_s)
                if kind == "stall":
                    notes.append(StallNotice(str(facts["reason"]), tuple(facts["ranks"]), (), at_s))
                elif kind in ("resume", "start"):
                    notes.append(None)
        return notes


def _worker_of(fd: int) -> _RecordedWorker | None:
    """Returns the worker for a recording; None until the worker has recorded its rank."""
    data = os.pread(fd, layout.HEADER.size, 0)
    if len(data) < layout.HEADER.size or _HEAD.unpack_from(data)[0] != layout.MAGIC:
        return None
    fields = layout.HEADER.unpack(data)
    return _RecordedWorker(fields[15], fields[14], fd) if fields[15] >= 0 else None
