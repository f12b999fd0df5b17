"""Looks at a running job: at the recordings of the workers of this machine, and at what the launcher has noted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.comm.record.layout import EventKind
from paceline.operate.dashboard.event_queue import EventQueue, Note, RemoteSample, WorkerGone, WorkerRunning
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
from paceline.operate.dashboard.recording_follower import OpenCall, RecordingFollower, RecordingUpdate, StandaloneEvent

TOTAL_STEPS = "total_steps"
"""The name under which a program logs once how many steps it will make."""

_SILENT_S = 10.0
_WAITING_S = 1.0  # a call that is open for so long is what the rank is doing, not a moment of its step
_STEPS_A_SECOND = 64  # that are worked out over all ranks; beyond that, every second or fourth one and so on is
_WEIGH_S = 4.0  # between two looks at a worker's memory
_IN_STEP = 2  # ranks that began together are no more steps apart
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Worker:
    rank: int
    pid: int
    host: str
    fd: int
    follower: RecordingFollower | None
    news: RecordingUpdate | None = None
    ended: str | None = None  # how; "" if all went well
    total_steps: int | None = None
    ahead: int | None = None  # how many steps the others had made before it began to count its own
    step: int | None = None  # on the others' count
    rates: LinkRates = field(default_factory=LinkRates)
    memory_nbytes: int = 0
    weighed_s: float = float("-inf")  # when its memory was looked at


class LocalCollector:
    """Takes samples of a job. All but `notes` belongs to one thread."""

    def __init__(self, notes: EventQueue, facts: JobInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.notes = notes
        self._facts = facts
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._elsewhere: dict[int, RankSample] = {}
        self._links_elsewhere: dict[int, tuple[LinkRate, ...]] = {}
        self._verdict: StallNotice | None = None
        self._looked_s: float | None = None
        self._stride = 1

    def look(self) -> JobSample:
        """Returns what is new since the last look."""
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
        here = [self._sample_of(worker, now_s, events) for worker in self._workers.values()]
        ranks = {each.rank: each for each in [*self._elsewhere.values(), *here]}
        links = self._links(now_s, passed_s) if passed_s is not None else ()
        self._choose_stride(here, passed_s)
        self._elsewhere = {rank: replace(each, steps=(), values=(), calls=()) for rank, each in self._elsewhere.items()}
        ordered = tuple(ranks[rank] for rank in sorted(ranks))
        return JobSample(
            now_s, self._current_facts(), ordered, links, tuple(events), tuple(lines), self._verdict, tuple(stacks)
        )

    def close(self) -> None:
        """Releases the recordings; idempotent."""
        for worker in self._workers.values():
            self._release(worker)

    def _apply_note(self, note: Note) -> None:
        match note:
            case WorkerRunning(rank, pid, host, fd):
                if rank in self._workers:
                    self._release(self._workers[rank])
                follower = RecordingFollower.of_descriptor(fd) if fd >= 0 else None
                self._workers[rank] = _Worker(rank, pid, host, fd, follower)
            case WorkerGone(rank, pid, how) if rank in self._workers and self._workers[rank].pid == pid:
                self._workers[rank].ended = how
            case RemoteSample(ranks, links):
                self._elsewhere.update((each.rank, _after(self._elsewhere.get(each.rank), each)) for each in ranks)
                for each in ranks:
                    self._links_elsewhere[each.rank] = tuple(link for link in links if link.rank == each.rank)
            case JobInfo():
                self._facts = note
                stale = [rank for rank in self._workers if rank >= note.world_size > 0]
                self._elsewhere = {r: each for r, each in self._elsewhere.items() if r < note.world_size}
                for rank in stale:
                    self._release(self._workers.pop(rank))
            case StallNotice() | None:
                self._verdict = note

    def _sample_of(self, worker: _Worker, now_s: float, events: list[JobEvent]) -> RankSample:
        news = worker.follower.news(self._stride) if worker.follower is not None else None
        if news is None:
            news = RecordingUpdate(heard_s=now_s)
            worker.news = None
        else:
            worker.news = news
            events += [event for mark in news.marks if (event := _event_of(worker.rank, mark)) is not None]
            self._count(worker, news)
            totals = [value for _, name, value in news.values if name == TOTAL_STEPS]
            worker.total_steps = int(totals[-1]) if totals else worker.total_steps
        if now_s - worker.weighed_s >= _WEIGH_S:
            worker.memory_nbytes, worker.weighed_s = _memory_of(worker.pid), now_s
        state, doing = _state_of(worker, now_s)
        ahead = worker.ahead or 0
        return RankSample(
            rank=worker.rank,
            host=worker.host,
            pid=worker.pid,
            state=state,
            doing=doing,
            heard_s=news.heard_s,
            memory_nbytes=worker.memory_nbytes,
            step=worker.step,
            steps=tuple(replace(step, step=step.step + ahead) for step in news.steps) if ahead else tuple(news.steps),
            values=tuple((step + ahead, name, value) for step, name, value in news.values if name != TOTAL_STEPS),
            calls=tuple(news.calls),
        )

    def _count(self, worker: _Worker, news: RecordingUpdate) -> None:
        """Puts the steps of a worker that has joined late on the others' count: each process counts from 1."""
        if news.step is None:
            return
        if worker.ahead is None:
            others = [each.step for each in self._workers.values() if each.step is not None and each.ended is None]
            behind = max(others, default=0) - news.step
            worker.ahead = behind if behind > _IN_STEP else 0
        worker.step = news.step + worker.ahead

    def _current_facts(self) -> JobInfo:
        totals = [worker.total_steps for worker in self._workers.values() if worker.total_steps is not None]
        return replace(self._facts, total_steps=max(totals)) if totals else self._facts

    def _links(self, now_s: float, passed_s: float) -> tuple[LinkRate, ...]:
        links = [link for rank in self._elsewhere for link in self._links_elsewhere.get(rank, ())]
        for worker in self._workers.values():
            news = worker.news
            if news is None:
                continue
            if news.shm_nbytes:
                links.append(LinkRate(worker.rank, -1, SHARED_MEMORY, news.shm_nbytes / passed_s))
            if news.links:
                links += worker.rates.take(worker.rank, news.links, now_s)
            elif news.tcp_nbytes:
                links.append(LinkRate(worker.rank, -1, TCP, news.tcp_nbytes / passed_s))
        return tuple(links)

    def _choose_stride(self, ranks: list[RankSample], passed_s: float | None) -> None:
        if passed_s is None or not ranks:
            return
        rate = sum(len(each.steps) for each in ranks) / passed_s
        while rate > _STEPS_A_SECOND:
            self._stride, rate = self._stride * 2, rate / 2
        if rate < _STEPS_A_SECOND / 4 and self._stride > 1:
            self._stride //= 2

    def _release(self, worker: _Worker) -> None:
        if worker.fd >= 0:
            os.close(worker.fd)
            worker.fd, worker.follower = -1, None


def _after(before: RankSample | None, news: RankSample) -> RankSample:
    """Returns what another machine has said, with what it said before and nobody has looked at yet."""
    if before is None:
        return news
    steps, values, calls = (before.steps + news.steps, before.values + news.values, before.calls + news.calls)
    return replace(news, steps=steps, values=values, calls=calls)


def _state_of(worker: _Worker, now_s: float) -> tuple[RankActivity, str]:
    news = worker.news
    if worker.ended is not None:
        return (RankActivity.DEAD, worker.ended) if worker.ended else (RankActivity.ENDED, "")
    if news is None:
        return RankActivity.STARTING, "has not recorded anything yet"
    if news.is_ended:
        return RankActivity.ENDED, ""
    calls = [call for call in news.open_calls if not call.is_async and now_s - call.arrived_s > _WAITING_S]
    if calls:
        return RankActivity.WAITING, f"in {_words_of(calls[0])} for {now_s - calls[0].arrived_s:.0f} s"
    quiet_s = now_s - news.heard_s
    if EventKind.DATA_WAIT in news.open_kinds and quiet_s > _WAITING_S:
        return RankActivity.LOADING, f"waits for data for {quiet_s:.0f} s"
    if quiet_s > _SILENT_S:
        return RankActivity.SILENT, f"has recorded nothing for {quiet_s:.0f} s"
    return (RankActivity.TRAINING if news.step is not None else RankActivity.RUNNING), ""


def _words_of(call: OpenCall) -> str:
    number = f", call {call.sequence:,}" if call.sequence else ""
    return f"{call.operation}({call.dtype}, {call.count:,}){number}"


def _event_of(rank: int, mark: StandaloneEvent) -> JobEvent | None:
    """Returns what to show of an event that a rank recorded; the launcher tells of views, once for all ranks."""
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
