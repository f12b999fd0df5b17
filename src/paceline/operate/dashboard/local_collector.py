"""Collector that runs in the launcher and uses the recordings of this machine's workers and the launcher's notes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.comm.record.layout import EventKind
from paceline.operate.dashboard.event_queue import EventQueue, Note, RemoteSample, WorkerEnded, WorkerRunning
from paceline.operate.dashboard.job_sample import (
    JobEvent,
    JobInfo,
    JobSample,
    Line,
    LinkRate,
    RankActivity,
    RankSample,
    Stack,
    StallNotice,
)
from paceline.operate.dashboard.link_rates import SHARED_MEMORY, TCP, LinkRates
from paceline.operate.dashboard.recording_follower import RecordingFollower, RecordingUpdate, StandaloneEvent
from paceline.operate.diagnosis.job_snapshot import RankState
from paceline.operate.diagnosis.recording_reader import NoRecordingError, rank_state_of, read_latest

TOTAL_STEPS = "total_steps"
"""The name under which a program logs its total number of steps (once)."""

_SILENT_S = 10.0
_PENDING_CALLS = 64  # number of most recent calls to read, in addition to those that have not ended
_OWED_S = 5.0  # the calls of all ranks are read if a rank has been waiting for this long
_WAITING_S = 1.0  # an open call is shown as the rank's activity after this time
_STEPS_A_SECOND = 64  # maximum number of steps read per second; beyond it, only every 2nd, 4th, ... step is read
_MEMORY_PERIOD_S = 4.0
_IN_STEP = 2  # maximum difference in steps between ranks that started together
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Worker:
    rank: int
    pid: int
    host: str
    fd: int
    follower: RecordingFollower | None
    update: RecordingUpdate | None = None
    has_ended: bool = False
    failure: str | None = ""  # description of the failure; "" for none, None if it must be read from the recording
    total_steps: int | None = None
    ahead: int | None = None  # number of steps that the other workers completed before this worker's first step
    step: int | None = None  # current step, in the other workers' numbering
    rates: LinkRates = field(default_factory=LinkRates)
    has_shm: bool = False  # whether the worker has sent data through shared memory
    has_tcp: bool = False  # whether the worker has sent data over the network
    pending: RankState | None = None
    pending_s: float = float("-inf")  # time of the latest record in `pending`
    memory_nbytes: int = 0
    memory_read_s: float = float("-inf")


class LocalCollector:
    """Collects samples of a running job. Only `notes` may be used by several threads."""

    def __init__(self, notes: EventQueue, facts: JobInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.notes = notes
        self._facts = facts
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._remote: dict[int, RankSample] = {}
        self._remote_links: dict[int, tuple[LinkRate, ...]] = {}
        self._verdict: StallNotice | None = None
        self._looked_s: float | None = None
        self._stride = 1

    def look(self) -> JobSample:
        """Returns a sample with everything new since the previous sample."""
        now_s = self._clock()
        events: list[JobEvent] = []
        lines: list[Line] = []
        stacks: list[Stack] = []
        for note in self.notes.take():
            match note:
                case JobEvent():
                    events.append(note)
                case Line():
                    lines.append(note)
                case Stack():
                    stacks.append(note)
                case _:
                    self._apply_note(note)
            if isinstance(note, RemoteSample):
                events += note.events
                lines += note.lines
                stacks += note.stacks
        passed_s = max(1e-3, now_s - self._looked_s) if self._looked_s is not None else None
        self._looked_s = now_s
        local = [self._sample_of(worker, now_s, events) for worker in self._workers.values()]
        ranks = {sample.rank: sample for sample in [*self._remote.values(), *local]}
        if any(self._waits_long(worker, now_s) for worker in self._workers.values()):
            local = [replace(sample, pending=self._pending_of(self._workers[sample.rank])) for sample in local]
            ranks.update((sample.rank, sample) for sample in local)
        links = self._links(now_s, passed_s) if passed_s is not None else ()
        self._choose_stride(local, passed_s)
        self._remote = {rank: replace(sample, steps=(), values=(), calls=()) for rank, sample in self._remote.items()}
        ordered = tuple(ranks[rank] for rank in sorted(ranks))
        return JobSample(
            now_s, self._current_facts(), ordered, links, tuple(events), tuple(lines), self._verdict, tuple(stacks)
        )

    def close(self) -> None:
        """Closes the recordings; idempotent."""
        for worker in self._workers.values():
            self._release(worker)

    def _apply_note(self, note: Note) -> None:
        match note:
            case WorkerRunning(rank, pid, host, fd):
                if rank in self._workers:
                    self._release(self._workers[rank])
                follower = RecordingFollower.of_descriptor(fd) if fd >= 0 else None
                self._workers[rank] = _Worker(rank, pid, host, fd, follower)
            case WorkerEnded(rank, pid, how) if rank in self._workers and self._workers[rank].pid == pid:
                self._workers[rank].has_ended, self._workers[rank].failure = True, how
            case RemoteSample(ranks, links):
                for sample in ranks:
                    self._remote[sample.rank] = _appended(self._remote.get(sample.rank), sample)
                    self._remote_links[sample.rank] = tuple(link for link in links if link.rank == sample.rank)
            case JobInfo():
                self._facts = note
                stale = [rank for rank in self._workers if rank >= note.world_size > 0]
                self._remote = {rank: sample for rank, sample in self._remote.items() if rank < note.world_size}
                for rank in stale:
                    self._release(self._workers.pop(rank))
            case StallNotice() | None:
                self._verdict = note

    def _sample_of(self, worker: _Worker, now_s: float, events: list[JobEvent]) -> RankSample:
        update = worker.update = worker.follower.update(self._stride) if worker.follower is not None else None
        if update is None:
            update = RecordingUpdate(last_record_s=now_s)
        else:
            events += [event for mark in update.marks if (event := _event_of(worker.rank, mark)) is not None]
            self._count(worker, update)
            totals = [value for _, name, value in update.values if name == TOTAL_STEPS]
            worker.total_steps = int(totals[-1]) if totals else worker.total_steps
        if now_s - worker.memory_read_s >= _MEMORY_PERIOD_S:
            worker.memory_nbytes, worker.memory_read_s = _memory_of(worker.pid), now_s
        state, doing = _state_of(worker, now_s)
        ahead = worker.ahead or 0
        return RankSample(
            rank=worker.rank,
            host=worker.host,
            pid=worker.pid,
            state=state,
            doing=doing,
            last_record_s=update.last_record_s,
            memory_nbytes=worker.memory_nbytes,
            step=worker.step,
            steps=tuple(replace(step, step=step.step + ahead) if ahead else step for step in update.steps),
            values=tuple((step + ahead, name, value) for step, name, value in update.values if name != TOTAL_STEPS),
            calls=tuple(update.calls),
        )

    def _waits_long(self, worker: _Worker, now_s: float) -> bool:
        calls = worker.update.open_calls if worker.update is not None and not worker.has_ended else []
        return any(now_s - call.arrived_s > _OWED_S for call in calls)

    def _pending_of(self, worker: _Worker) -> RankState | None:
        """Returns the worker's groups and latest calls. They are read again only if the worker has recorded more."""
        if worker.update is not None and worker.fd >= 0 and worker.pending_s != worker.update.last_record_s:
            worker.pending_s = worker.update.last_record_s
            with contextlib.suppress(OSError, NoRecordingError):
                worker.pending = rank_state_of(read_latest(worker.fd, _PENDING_CALLS, 0), worker.rank)
        return worker.pending

    def _count(self, worker: _Worker, update: RecordingUpdate) -> None:
        """Adjusts the step number of a worker that joined late, because each process counts its steps from 1."""
        if update.step is None:
            return
        if worker.ahead is None:
            steps = [other.step for other in self._workers.values() if other.step is not None and not other.has_ended]
            behind = max(steps, default=0) - update.step
            worker.ahead = behind if behind > _IN_STEP else 0
        worker.step = update.step + worker.ahead

    def _current_facts(self) -> JobInfo:
        totals = [worker.total_steps for worker in self._workers.values() if worker.total_steps is not None]
        return replace(self._facts, total_steps=max(totals)) if totals else self._facts

    def _links(self, now_s: float, passed_s: float) -> tuple[LinkRate, ...]:
        links = [link for rank in self._remote for link in self._remote_links.get(rank, ())]
        for worker in self._workers.values():
            update = worker.update
            if update is None:
                continue
            worker.has_shm = worker.has_shm or update.shm_nbytes > 0
            worker.has_tcp = worker.has_tcp or update.tcp_nbytes > 0
            if worker.has_shm:
                links.append(LinkRate(worker.rank, -1, SHARED_MEMORY, update.shm_nbytes / passed_s))
            if update.links:
                links += worker.rates.take(worker.rank, update.links, now_s)
            elif worker.has_tcp:
                links.append(LinkRate(worker.rank, -1, TCP, update.tcp_nbytes / passed_s))
        return tuple(links)

    def _choose_stride(self, ranks: list[RankSample], passed_s: float | None) -> None:
        if passed_s is None or not ranks:
            return
        rate = sum(len(sample.steps) for sample in ranks) / passed_s
        while rate > _STEPS_A_SECOND:
            self._stride, rate = self._stride * 2, rate / 2
        if rate < _STEPS_A_SECOND / 4 and self._stride > 1:
            self._stride //= 2

    def _release(self, worker: _Worker) -> None:
        if worker.fd >= 0:
            os.close(worker.fd)
            worker.fd, worker.follower = -1, None


def _appended(before: RankSample | None, new: RankSample) -> RankSample:
    """Returns `new` with the steps, values and calls from an earlier sample that has not been returned yet."""
    if before is None:
        return new
    steps, values, calls = (before.steps + new.steps, before.values + new.values, before.calls + new.calls)
    return replace(new, steps=steps, values=values, calls=calls)


def _state_of(worker: _Worker, now_s: float) -> tuple[RankActivity, str]:
    update = worker.update
    if worker.has_ended:
        failure = worker.failure
        if failure is None:
            failure = "" if update is not None and update.is_ended else "has ended without completing its script"
        return (RankActivity.DEAD, failure) if failure else (RankActivity.ENDED, "")
    if update is None:
        return RankActivity.STARTING, "has not recorded anything yet"
    if update.is_ended:
        return RankActivity.ENDED, ""
    calls = [call for call in update.open_calls if not call.is_async and now_s - call.arrived_s > _WAITING_S]
    if calls:
        call = calls[0]
        number = f", call {call.sequence:,}" if call.sequence else ""
        text = f"{call.operation}({call.dtype}, {call.count:,}){number}"
        return RankActivity.WAITING, f"in {text} for {now_s - call.arrived_s:.0f} s"
    quiet_s = now_s - update.last_record_s
    if EventKind.DATA_WAIT in update.open_kinds and quiet_s > _WAITING_S:
        return RankActivity.LOADING, f"waits for data for {quiet_s:.0f} s"
    if quiet_s > _SILENT_S:
        return RankActivity.SILENT, f"has recorded nothing for {quiet_s:.0f} s"
    return (RankActivity.TRAINING if update.step is not None else RankActivity.RUNNING), ""


def _event_of(rank: int, mark: StandaloneEvent) -> JobEvent | None:
    """Returns the event to display for a rank's mark, or None.

    Marks for views are ignored, because the launcher reports views.
    """
    if mark.kind is not EventKind.CHECKPOINT:
        return None
    return JobEvent(
        mark.end_s, "checkpoint", f"rank {rank}: {mark.name or 'checkpoint'}", round(mark.end_s - mark.start_s, 3)
    )


def _memory_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
