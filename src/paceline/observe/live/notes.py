"""What a launcher tells the page: small facts, left without waiting and read in the page's own thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

from paceline.observe.live.sample import Event, Facts, Line, Link, RankSample, Stack, Verdict

_MOST = 20_000  # notes that wait for a page that does not come to read them; then the oldest are lost
_MOST_LINES = 2000  # likewise of the workers' output, which must not displace what is rare


@dataclass(frozen=True)
class WorkerBegan:
    """A worker runs as this rank; `fd` is a descriptor of its recording, which the page's thread closes, or -1."""

    rank: int
    pid: int
    host: str
    fd: int = -1


@dataclass(frozen=True)
class WorkerEnded:
    """The worker of this rank has ended; `how` is "" if all went well, otherwise what the launcher says of it."""

    rank: int
    pid: int
    how: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """What another machine's launcher has seen of its ranks since it last said so."""

    ranks: tuple[RankSample, ...] = ()
    links: tuple[Link, ...] = ()
    events: tuple[Event, ...] = ()
    lines: tuple[Line, ...] = ()
    stacks: tuple[Stack, ...] = ()


Note = WorkerBegan | WorkerEnded | Elsewhere | Event | Line | Verdict | Stack | Facts | None
"""`None` withdraws the verdict: the job gets on again."""


class Notes:
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
        self.leave(WorkerBegan(rank, pid, host, os.dup(fd) if fd is not None and fd >= 0 else -1))

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
                if isinstance(note, WorkerBegan) and note.fd >= 0:
                    os.close(note.fd)
            self._notes.clear()
