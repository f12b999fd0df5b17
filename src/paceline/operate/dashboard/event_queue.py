"""What a launcher tells the page: small facts, left without waiting and read in the page's own thread.

Tells a launcher's events as the page shows them: starts, deaths, new views, and what they cost.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

from paceline.operate.dashboard.job_sample import JobEvent, JobInfo, Line, LinkRate, RankSample, Stack, StallNotice

Fact = str | int | list[int]

TOLD_BY_ALL = frozenset({"wait", "view", "end"})
"""Kinds of events that the launchers of all machines tell, so that one of them is enough."""

_NUMBER = (1 << 32) - 1  # of a view within the term of its coordinator, which is in the bits above


class EventFormatter:
    """Turns events into what a person wants to read; without a clock."""

    def __init__(self) -> None:
        self._view = 0
        self._broken_s: float | None = None  # since when a worker is missing that has not been made up for

    def tell(self, event: str, facts: dict[str, Fact], now_s: float) -> list[JobEvent]:
        """Returns what to show of an event that happens now, if anything."""
        match event:
            case "start":
                ranks = facts.get("ranks", [])
                assert isinstance(ranks, list)
                which = f"worker {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} workers, {ranks[0]} to {ranks[-1]}"
                number = facts.get("generation", 1)
                text = f"{which} started" if number == 1 else f"{which} started again, for the {number}. time"
                return [JobEvent(now_s, "start" if number == 1 else "restart", text)]
            case "failure":
                return [
                    JobEvent(
                        now_s, "failure", f"rank {facts.get('rank')} (process {facts.get('pid')}): {facts.get('how')}"
                    )
                ]
            case "ended":
                self._broken_s = now_s if self._broken_s is None else self._broken_s
                return [JobEvent(now_s, "death", f"worker {facts.get('uid')}: {facts.get('how')}")]
            case "worker":
                return [JobEvent(now_s, "join", f"worker {facts.get('uid')} begins as process {facts.get('pid')}")]
            case "installed":
                return self._entered(int(str(facts.get("view", 0))), now_s)
            case "wait":
                return [JobEvent(now_s, "wait", str(facts.get("reason", "")))]
            case "end":
                code = facts.get("code", 0)
                return [
                    JobEvent(
                        now_s, "end", "the job has ended" if code == 0 else f"the job has failed, exit code {code}"
                    )
                ]
        return []

    def _entered(self, view: int, now_s: float) -> list[JobEvent]:
        if view <= self._view:
            return []
        self._view = view
        cost_s = None if self._broken_s is None else round(now_s - self._broken_s, 3)
        self._broken_s = None
        return [JobEvent(now_s, "view", f"view {view & _NUMBER}: the workers train together", cost_s)]


_MOST = 20_000  # notes that wait for a page that does not come to read them; then the oldest are lost
_MOST_LINES = 2000  # likewise of the workers' output, which must not displace what is rare


@dataclass(frozen=True)
class WorkerRunning:
    """A worker runs as this rank; `fd` is a descriptor of its recording, which the page's thread closes, or -1."""

    rank: int
    pid: int
    host: str
    fd: int = -1


@dataclass(frozen=True)
class WorkerGone:
    """The worker of this rank has ended; `how` is "" if all went well, otherwise what the launcher says of it."""

    rank: int
    pid: int
    how: str = ""


@dataclass(frozen=True)
class RemoteSample:
    """What another machine's launcher has seen of its ranks since it last said so."""

    ranks: tuple[RankSample, ...] = ()
    links: tuple[LinkRate, ...] = ()
    events: tuple[JobEvent, ...] = ()
    lines: tuple[Line, ...] = ()
    stacks: tuple[Stack, ...] = ()


Note = WorkerRunning | WorkerGone | RemoteSample | JobEvent | Line | StallNotice | Stack | JobInfo | None
"""`None` withdraws the verdict: the job gets on again."""


class EventQueue:
    """A place where one thread leaves notes and another takes them. Leaving a note never waits for the reader."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque(maxlen=_MOST)
        self._lines: deque[Line] = deque(maxlen=_MOST_LINES)
        self._is_open = True
        self._lock = threading.Lock()  # so that a descriptor is either taken or closed here

    def leave(self, note: Note) -> None:
        """Leaves a note."""
        with self._lock:
            if self._is_open:
                self._lines.append(note) if isinstance(note, Line) else self._notes.append(note)

    def leave_worker(self, rank: int, pid: int, host: str, fd: int | None) -> None:
        """Says that a worker has begun; `fd` remains the caller's."""
        self.leave(WorkerRunning(rank, pid, host, os.dup(fd) if fd is not None and fd >= 0 else -1))

    def take(self) -> list[Note]:
        """Returns the notes that wait, in order, and the lines after the others."""
        with self._lock:
            notes = [*self._notes, *self._lines]
            self._notes.clear()
            self._lines.clear()
        return notes

    def close(self) -> None:
        """Takes no more notes, and releases what those that wait hold; idempotent."""
        with self._lock:
            self._is_open = False
            for note in self._notes:
                if isinstance(note, WorkerRunning) and note.fd >= 0:
                    os.close(note.fd)
            self._notes.clear()
