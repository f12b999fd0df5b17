"""Repeatedly kills or stops a random worker of a job, at random times drawn from a seed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from random import Random

from elastic_cases import timeline
from elastic_cases.jobs import Job

_POLL_S = 0.02
_LAST_PART = 0.85  # no kills after this share of the steps: a replacement would join too late
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Kill:
    """A worker that was killed, and the monotonic time of the kill."""

    slot: int
    pid: int
    at_ns: int


@dataclass(frozen=True)
class Churn:
    """The kills in a job.

    After each kill, all `workers` slots commit a step, and the next kill follows after a random time of up to `rest_s`.

    Attributes:
        workers: The number of slots.
        steps: The number of steps of the job.
        most: The maximum number of kills; a short job may have fewer.
        signal: The signal that is sent.
        rest_s: The maximum time between the return of all workers and the next kill, in seconds.
        slots: The slots whose workers may be killed, or () for all.
    """

    workers: int
    steps: int
    most: int
    signal: int = signal.SIGKILL
    rest_s: float = 1.0
    slots: tuple[int, ...] = ()


def disturb(job: Job, churn: Churn, random: Random) -> list[Kill]:
    """Runs a job until it completes; returns the kills.

    Raises:
        TimeoutError: The job does not complete in time.
    """
    kills: list[Kill] = []
    due_s: float | None = None
    deadline_s = time.monotonic() + _DEADLINE_S
    while not job.is_over():
        time.sleep(_POLL_S)
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise TimeoutError(f"the job does not end; it has printed:\n{job.output()[-3000:]}")
        notes = timeline.latest(job.directory)
        since_ns = kills[-1].at_ns if kills else 0
        back = {note.slot: note.pid for note in notes if note.at_ns > since_ns}
        furthest = max((note.step for note in notes), default=0)
        if len(kills) == churn.most or furthest > _LAST_PART * churn.steps or len(back) < churn.workers:
            due_s = None
            continue
        due_s = now_s + random.uniform(0.0, churn.rest_s) if due_s is None else due_s
        if now_s >= due_s:
            slot = random.choice(churn.slots or sorted(back))
            os.kill(back[slot], churn.signal)
            kills.append(Kill(slot, back[slot], time.monotonic_ns()))
            due_s = None
    return kills
