"""Queue of notes from the launcher to the dashboard thread, and formatting of launcher events."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

from paceline.operate.dashboard.job_sample import JobEvent, JobInfo, Line, LinkRate, RankSample, Stack, StallNotice

Fact = str | int | list[int]

SENT_BY_ALL = frozenset({"wait", "stall", "resume", "view", "end"})
"""Kinds of events that the launchers on all machines report. The report from one launcher is sufficient."""

_NUMBER = (1 << 32) - 1  # mask for a view's number; the higher bits contain the coordinator's term
_MOST = 20_000  # maximum number of unread notes; if exceeded, the oldest notes are dropped
_MOST_LINES = 2000  # maximum number of unread lines of worker output, which must not displace other notes


class EventFormatter:
    """Formats launcher events for the user. Does not read a clock."""

    def __init__(self) -> None:
        self._view = 0
        self._broken_s: float | None = None  # time of the first loss of a worker since the last view
        self._stalled_s: float | None = None  # time of the first diagnosis of the current stall

    def format(self, event: str, facts: dict[str, Fact], now_s: float) -> list[JobEvent]:
        """Returns the displayed form of an event that occurred at `now_s`; empty if the event is not displayed."""
        match event:
            case "start":
                ranks = facts.get("ranks", [])
                assert isinstance(ranks, list)
                which = f"worker {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} workers, {ranks[0]} to {ranks[-1]}"
                number = facts.get("generation", 1)
                text = f"{which} started" if number == 1 else f"{which} restarted (start number {number})"
                return [JobEvent(now_s, "start" if number == 1 else "restart", text)]
            case "failure":
                text = f"rank {facts.get('rank')} (process {facts.get('pid')}): {facts.get('how')}"
                return [JobEvent(now_s, "failure", text)]
            case "ended" if facts.get("how") == "exit code 0":
                return [JobEvent(now_s, "exit", f"worker {facts.get('uid')}: its script has finished")]
            case "ended":
                self._broken_s = now_s if self._broken_s is None else self._broken_s
                return [JobEvent(now_s, "death", f"worker {facts.get('uid')}: {facts.get('how')}")]
            case "worker":
                return [JobEvent(now_s, "join", f"worker {facts.get('uid')} started as process {facts.get('pid')}")]
            case "installed":
                return self._entered(int(str(facts.get("view", 0))), now_s)
            case "wait":
                return [JobEvent(now_s, "wait", str(facts.get("reason", "")))]
            case "stall":
                self._stalled_s = now_s if self._stalled_s is None else self._stalled_s
                return [JobEvent(now_s, "stall", str(facts.get("reason", "")))]
            case "resume":
                stalled_s, self._stalled_s = self._stalled_s, None
                cost_s = None if stalled_s is None else round(now_s - stalled_s, 3)
                return [JobEvent(now_s, "resume", str(facts.get("reason", "")), cost_s)]
            case "end":
                code = facts.get("code", 0)
                text = "the job has ended" if code == 0 else f"the job has failed, exit code {code}"
                return [JobEvent(now_s, "end", text)]
        return []

    def _entered(self, view: int, now_s: float) -> list[JobEvent]:
        if view <= self._view:
            return []
        self._view = view
        cost_s = None if self._broken_s is None else round(now_s - self._broken_s, 3)
        self._broken_s = None
        return [JobEvent(now_s, "view", f"view {view & _NUMBER}: the workers train together", cost_s)]


@dataclass(frozen=True)
class WorkerRunning:
    """A note about a worker that is running.

    `fd` is a file descriptor for its recording, or -1 if there is none; the dashboard thread closes it.
    """

    rank: int
    pid: int
    host: str
    fd: int = -1


@dataclass(frozen=True)
class WorkerEnded:
    """A note about a worker that has exited.

    `how` describes the failure. It is "" if the worker succeeded or was asked to exit, and None if only the recording
    shows whether the worker succeeded.
    """

    rank: int
    pid: int
    how: str | None = ""


@dataclass(frozen=True)
class RemoteSample:
    """A note with the state of another machine's ranks, and the machine's events and output since the previous note."""

    ranks: tuple[RankSample, ...] = ()
    links: tuple[LinkRate, ...] = ()
    events: tuple[JobEvent, ...] = ()
    lines: tuple[Line, ...] = ()
    stacks: tuple[Stack, ...] = ()


Note = WorkerRunning | WorkerEnded | RemoteSample | JobEvent | Line | StallNotice | Stack | JobInfo | None
"""A note; `None` withdraws the diagnosis, because the job has resumed."""


class EventQueue:
    """Queue of notes between two threads. Adding a note never blocks."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque(maxlen=_MOST)
        self._lines: deque[Line] = deque(maxlen=_MOST_LINES)
        self._is_open = True
        self._lock = threading.Lock()  # ensures that each descriptor is either taken or closed

    def leave(self, note: Note) -> None:
        """Adds a note, unless the queue is closed."""
        with self._lock:
            if self._is_open:
                self._lines.append(note) if isinstance(note, Line) else self._notes.append(note)

    def leave_worker(self, rank: int, pid: int, host: str, fd: int | None) -> None:
        """Adds a note that a worker is running. Duplicates `fd`."""
        self.leave(WorkerRunning(rank, pid, host, os.dup(fd) if fd is not None and fd >= 0 else -1))

    def take(self) -> list[Note]:
        """Removes and returns all notes in order, except that lines of output are last."""
        with self._lock:
            notes = [*self._notes, *self._lines]
            self._notes.clear()
            self._lines.clear()
        return notes

    def close(self) -> None:
        """Rejects further notes and closes the descriptors in unread notes; idempotent."""
        with self._lock:
            self._is_open = False
            for note in self._notes:
                if isinstance(note, WorkerRunning) and note.fd >= 0:
                    os.close(note.fd)
            self._notes.clear()
