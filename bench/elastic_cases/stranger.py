"""Measures how much an unrelated process that uses a share of a core slows down a job."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from elastic_cases import busy, timeline
from elastic_cases.jobs import Job
from elastic_cases.timeline import Commit

_TURN_NS = 1_000_000_000  # how long the unrelated process runs, and how long it then pauses
_SETTLES_NS = 100_000_000
_POLL_S = 0.02
_DEADLINE_S = 600.0
Turn = tuple[int, int]  # start and end (monotonic)


def slowdown(job: Job, share: float) -> float | None:
    """Runs a job until it completes. Every other second, an unrelated process uses `share` of a core.

    Returns:
        The median step in those seconds divided by the median step in the other seconds, or None if the job was too
        short.

    Raises:
        TimeoutError: The job does not complete in time.
    """
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    with subprocess.Popen([sys.executable, str(Path(busy.__file__)), str(share)]) as process:
        try:
            until_s, runs = time.monotonic() + _DEADLINE_S, True
            while not job.is_over():
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the job does not end; it has printed:\n{job.output()[-3000:]}")
                process.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
                began_ns = time.monotonic_ns()
                while time.monotonic_ns() < began_ns + _TURN_NS and not job.is_over():
                    time.sleep(_POLL_S)
                turns[runs].append((began_ns + _SETTLES_NS, time.monotonic_ns()))
                runs = not runs
        finally:
            process.kill()
    notes = timeline.read(job.directory)
    beside, alone = [*_steps_within(notes, turns[True])], [*_steps_within(notes, turns[False])]
    return statistics.median(beside) / statistics.median(alone) if beside and alone else None


def _steps_within(notes: Sequence[Commit], turns: Sequence[Turn]) -> Iterator[int]:
    """Yields the durations of the steps that lie within the given periods."""
    for slot in {note.slot for note in notes}:
        for earlier, later in pairwise(note for note in notes if note.slot == slot):
            if any(first_ns < earlier.at_ns and later.at_ns < last_ns for first_ns, last_ns in turns):
                yield later.at_ns - earlier.at_ns
