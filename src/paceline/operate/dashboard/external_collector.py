"""Collectors that run outside the launcher, for a running job on this machine or for the directories of a job.

`ExternalCollector` opens the launcher's recordings through /proc/PID/fd, which the kernel permits for processes of the
same user. The launcher and the workers are not affected. The job's events, including the diagnosis of a stall, are read
from the file that the launcher appends to. `aggregate_directories` builds one sample from the directories of a running
or finished job.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.comm.record import layout
from paceline.comm.record.recorder import MEMORY_NAME, SUFFIX
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.dashboard_state import DashboardState
from paceline.operate.dashboard.event_queue import SENT_BY_ALL, EventFormatter, EventQueue, WorkerEnded
from paceline.operate.dashboard.job_sample import (
    JobEvent,
    JobInfo,
    JobSample,
    Line,
    LinkRate,
    RankActivity,
    RankSample,
    StallNotice,
)
from paceline.operate.dashboard.link_rates import SHARED_MEMORY, TCP, links_over
from paceline.operate.dashboard.local_collector import TOTAL_STEPS, LocalCollector
from paceline.operate.dashboard.recording_follower import RecordingFollower, RecordingUpdate
from paceline.operate.diagnosis.recording_reader import (
    NoRecordingError,
    RecordingSource,
    machines_in,
    memory_of,
    shifts_of,
    source_of,
)
from paceline.operate.diagnosis.runs import EVENTS_FILE, JOB_FILE, JobRun, RunStatus, files_of_job, read_run

_LINK = f"/memfd:{MEMORY_NAME} (deleted)"
_HEAD = struct.Struct("<Q")


class OutOfReachError(Exception):
    """Raised if the job has ended, or if this user is not permitted to read its recordings."""


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
        self._open: dict[int, int] = {}  # descriptors for recordings, keyed by the recording's inode
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
            self._notes.leave(WorkerEnded(worker.rank, worker.pid, None))


class EventFollower:
    """Incremental reader for a launcher's event file.

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
                notes += self._formatter.format(kind, facts, at_s)
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


_ATTEMPT = re.compile(r"attempt_(\d+)")
_LAST_LINES = 400  # number of most recent output lines to read, per rank and stream
_STEPS_KEPT = 2000


class NothingRecordedError(ValueError):
    """Raised if a directory does not contain any readable recordings."""


@dataclass(frozen=True)
class _RankRecording:
    """The recording of one rank in the file `path`, with times on the job's clock."""

    path: Path
    follower: RecordingFollower
    update: RecordingUpdate


def aggregate_directories(directories: Sequence[Path], verdict: StallNotice | None = None) -> DashboardAggregator:
    """Aggregates the data of a job's last attempt, read from the job's directories on all machines.

    Args:
        directories: the job's directories on all machines, as listed by `paceline runs`.
        verdict: the diagnosis of the job's failure, or None.

    Raises:
        NothingRecordedError: the directories do not contain any recordings.
    """
    recordings = _recordings(directories)
    if not recordings:
        raise NothingRecordedError(
            f"{' and '.join(map(str, directories))} contains no recordings; specify the directory of a job, which "
            "`paceline runs` lists, or its copy"
        )
    job = next((found for directory in directories if (found := _job(directory))), {})
    now_s = max(recorded.update.last_record_s for recorded in recordings.values())
    was_stopped = job.get("state") == "stopped"
    ranks = tuple(_sample(rank, recordings[rank], was_stopped) for rank in sorted(recordings))
    links = tuple(link for rank in sorted(recordings) for link in _links(rank, recordings[rank].update))
    if was_stopped:
        verdict = None  # stopping a rank is not a failure
    events: list[JobEvent] = []
    lines: list[Line] = []
    for index, directory in enumerate(directories):
        local = [
            recorded.update.last_record_s for recorded in recordings.values() if recorded.path.is_relative_to(directory)
        ]
        end_s = max(local, default=0.0)
        events += [
            event
            for event in _events(directory, float(_job(directory).get("ended_s", 0.0)), end_s)
            if index == 0 or event.kind not in SENT_BY_ALL
        ]
        lines += [line for path in files_of_job(directory, "std*.log") for line in _lines(path, end_s)]
    events.sort(key=lambda event: event.at_s)
    facts = _facts(directories[0], job, recordings, ranks, now_s)
    aggregator = DashboardAggregator(steps_kept=_STEPS_KEPT, steps_averaged=_STEPS_KEPT)
    aggregator.take(JobSample(now_s, facts, ranks, links, tuple(events), tuple(lines), verdict))
    return aggregator


def _recordings(directories: Sequence[Path]) -> dict[int, _RankRecording]:
    """Returns each rank's readable recording; if there are several, the one from the last attempt."""
    found: list[tuple[RecordingSource, bytes]] = []
    paths = (path for directory in directories for path in files_of_job(directory, f"*{SUFFIX}"))
    for path in sorted(paths, key=_attempt):
        with contextlib.suppress(OSError, NoRecordingError):
            data = memory_of(path)
            found.append((source_of(data, path), data))
    shifts, _ = shifts_of([source for source, _ in found], machines_in(directories))
    recordings = {}
    for (source, data), shift_ns in zip(found, shifts, strict=True):
        follower = RecordingFollower(functools.partial(_part, data), is_whole=True, shift_s=shift_ns / 1e9)
        update = follower.update()
        if update is not None:
            number = follower.rank if follower.rank is not None else _number_of(source.path)
            recordings[number] = _RankRecording(source.path, follower, update)
    return recordings


def _part(data: bytes, offset: int, nbytes: int) -> bytes:
    return data[offset : offset + nbytes]


def _attempt(path: Path) -> tuple[int, str]:
    found = _ATTEMPT.search(str(path))
    return (int(found[1]) if found else 0, str(path))


def _number_of(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdecimal() else 0


def _links(rank: int, update: RecordingUpdate) -> Iterator[LinkRate]:
    """Yields the rates of a rank's links, averaged over the time that its recording covers."""
    span_s = update.last_record_s - update.steps[0].begin_s if update.steps else 0.0
    if span_s <= 0:
        return
    if update.shm_nbytes:
        yield LinkRate(rank, -1, SHARED_MEMORY, update.shm_nbytes / span_s)
    if update.links:
        yield from links_over(rank, update.links, span_s)
    elif update.tcp_nbytes:
        yield LinkRate(rank, -1, TCP, update.tcp_nbytes / span_s)


def _sample(rank: int, recorded: _RankRecording, was_stopped: bool) -> RankSample:
    """Returns a rank's sample with all data from its recording."""
    update = recorded.update
    waits = [call for call in update.open_calls if not call.is_async]
    doing = f"was in {waits[0].operation}, call {waits[0].sequence}" if waits else ""
    return RankSample(
        rank=rank,
        host=recorded.follower.host,
        pid=recorded.follower.pid,
        state=RankActivity.ENDED if update.is_ended or was_stopped else RankActivity.DEAD,
        doing=doing,
        last_record_s=update.last_record_s,
        step=update.step,
        steps=tuple(update.steps),
        values=tuple(value for value in update.values if value[1] != TOTAL_STEPS),
        calls=tuple(update.calls),
    )


def _facts(
    directory: Path,
    job: dict[str, Any],
    recordings: Mapping[int, _RankRecording],
    ranks: tuple[RankSample, ...],
    now_s: float,
) -> JobInfo:
    took_s = job.get("ended_s", 0) - job.get("started_s", 0) if "ended_s" in job else None
    first_s = min((step.begin_s for sample in ranks for step in sample.steps), default=now_s)
    state = str(job.get("state", "over"))
    values = (value for recorded in recordings.values() for value in recorded.update.values)
    total = max((int(value) for _, name, value in values if name == TOTAL_STEPS), default=0)
    return JobInfo(
        total_steps=total or None,
        run_id=str(job.get("job", directory.name)),
        command=" ".join(["paceline run", *map(str, job.get("command", ()))]) if job.get("command") else "",
        world_size=len(ranks),
        started_s=now_s - took_s if took_s is not None else first_s,
        outcome=state if state != "running" else "",
    )


def _job(directory: Path) -> dict[str, Any]:
    """Returns the content of the launcher's job file, or an empty dictionary."""
    for path in files_of_job(directory, JOB_FILE):
        with contextlib.suppress(OSError, ValueError):
            job = json.loads(path.read_bytes())
            if isinstance(job, dict):
                return job
    return {}


def _events(directory: Path, ended_s: float, now_s: float) -> Iterator[JobEvent]:
    """Yields the launcher's events. `now_s` (job's clock) and `ended_s` (time of day) denote the same instant."""
    for path in files_of_job(directory, EVENTS_FILE):
        formatter = EventFormatter()
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                fields = json.loads(text)
                at_s = now_s + float(fields["time_s"]) - ended_s if ended_s else now_s
                yield from formatter.format(str(fields["event"]), fields, at_s)


def _lines(path: Path, now_s: float) -> Iterator[Line]:
    stream = 2 if path.name.startswith("stderr") else 1
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _LAST_LINES * 200))
        kept = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    for text in kept:
        yield Line(now_s, _number_of(path), stream, text)
