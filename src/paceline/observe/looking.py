"""Looks at the workers of this machine: their recordings, their stacks, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.observe import processes, stacks
from paceline.observe.evidence import STILL, Frame, Process, Rank
from paceline.observe.glimpse import glimpse, has_open_calls
from paceline.observe.picture import Picture
from paceline.observe.reading import NoRecordingError
from paceline.observe.taking import take
from paceline.observe.watching import LOOK_S, Patience, Watched, overdue
from paceline.observe.witnesses import MOST_CALLS, witness


def look(workers: Sequence[Watched], patience: Patience, is_asked: bool, look_s: float = LOOK_S) -> Picture | None:
    """Returns what the workers do; takes `look_s`, except that it returns None at once if none of them waits too long.

    Args:
        workers: whom to look at.
        patience: how long a call may last. It may last `look_s` longer when the picture is there.
        is_asked: whether the picture is needed in any case.
        look_s: for how long.
    """
    soon = Patience(patience.floor_s - look_s, patience.ceiling_s - look_s)
    if not is_asked and not any(_waits_too_long(worker, soon) for worker in workers):
        return None
    began_s = time.monotonic()
    first = {worker.pid: processes.sample(worker.pid) for worker in workers}
    before = {worker.pid: _stack(worker.pid, first[worker.pid]) for worker in workers}
    time.sleep(max(0.0, began_s + look_s - time.monotonic()))
    ranks = []
    for worker in workers:
        process = processes.between(first[worker.pid], last := processes.sample(worker.pid))
        frames, earlier = _stack(worker.pid, last), before[worker.pid]
        moves = bool(frames and earlier) and frames != earlier  # a stack that did not come in time says nothing
        is_still = process.state in STILL
        ranks.append(seen(worker, replace(process, moves=moves), frames or (() if is_still else earlier)))
    return Picture(time.monotonic(), tuple(ranks), _stalled_since_s(ranks, soon))


def _waits_too_long(worker: Watched, patience: Patience) -> bool:
    """Returns whether a worker is in a call that lasts too long; quickly, if it is in none."""
    if worker.recording is None or not has_open_calls(worker.recording):
        return False
    return overdue(_recorded(worker), time.monotonic(), patience) is not None


def last_look(workers: Sequence[Watched]) -> Picture:
    """Returns what the recordings of workers say that have ended."""
    return Picture(
        time.monotonic(), tuple(replace(_recorded(each), ending=each.ending, place=None) for each in workers)
    )


def seen(worker: Watched, process: Process, frames: Sequence[Frame], most_calls: int = MOST_CALLS) -> Rank:
    """Returns what is known of a worker with this process and stack, with its latest calls."""
    recorded = _recorded(worker, most_calls)
    place = stacks.place_of(frames) or recorded.place
    if worker.ending is not None:
        return replace(recorded, ending=worker.ending, place=None)
    return replace(recorded, process=process, place=place)


def _recorded(worker: Watched, most_calls: int = MOST_CALLS) -> Rank:
    with contextlib.suppress(NoRecordingError, OSError):
        if worker.recording is not None:
            recording = glimpse(worker.recording, most_calls, most_events=most_calls)
            return replace(witness(recording, worker.number), pid=worker.pid)
    return Rank(worker.number, os.uname().nodename, worker.pid)


def _stalled_since_s(ranks: Sequence[Rank], patience: Patience) -> float | None:
    """Returns when the call began that lasts longest of those that last too long."""
    now_s = time.monotonic()
    calls = [call for rank in ranks if (call := overdue(rank, now_s, patience)) is not None]
    return min((call.arrived_s for call in calls), default=None)


def _stack(pid: int, sample: processes.Sample | None, timeout_s: float = 1.0) -> tuple[Frame, ...]:
    is_still = sample is None or processes.between(sample, sample).state in STILL
    return () if is_still else take(pid, timeout_s)
