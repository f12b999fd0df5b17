"""Snapshot of one machine's workers (their recordings, stacks and processes), and its conversion to JSON.

Launchers send the JSON to each other, and write it to the job's directory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted
from paceline.operate.diagnosis import worker_process
from paceline.operate.diagnosis.clock_offset import shifted
from paceline.operate.diagnosis.job_snapshot import (
    STILL,
    Frame,
    JobSnapshot,
    ProcessActivity,
    RankCall,
    RankState,
    is_idle,
)
from paceline.operate.diagnosis.recording_reader import (
    MOST_CALLS,
    NoRecordingError,
    has_open_waits,
    rank_state_of,
    read_latest,
)
from paceline.operate.diagnosis.stall_detector import LOOK_S, StallThreshold, WatchedWorker, overdue_since_s
from paceline.operate.diagnosis.worker_process import capture_stack

_MOST_CALLS = 8192  # maximum number of calls sent to another machine, over all ranks


@dataclass(frozen=True)
class MachineSnapshot:
    """The states of the ranks on one machine.

    Attributes:
        taken_s: the time of the snapshot on the machine's monotonic clock, which all times in `ranks` also use.
        ranks: the states of the ranks.
        stalled_since_s: the start time of the longest overdue call or wait for a store. If there is none, the time
            since which all ranks have been idle, or None if some rank is not idle.
    """

    taken_s: float
    ranks: tuple[RankState, ...]
    stalled_since_s: float | None = None


# Created at import, because msgspec 0.22 crashes if two threads create it at the same time.
_decoder = msgspec.json.Decoder(MachineSnapshot)


def encode(snapshot: MachineSnapshot) -> str:
    """Returns a snapshot as JSON, limited to the calls that another machine needs."""
    most = _MOST_CALLS // max(8, len(snapshot.ranks))
    short = tuple(replace(rank, calls=_latest(rank.calls, most)) for rank in snapshot.ranks)
    return msgspec.json.encode(replace(snapshot, ranks=short)).decode()


def _latest(calls: tuple[RankCall, ...], most: int) -> tuple[RankCall, ...]:
    """Returns the latest calls, and earlier calls that have not ended."""
    return (*(call for call in calls[:-most] if call.ended_s is None), *calls[-most:])


def decode(body: str) -> MachineSnapshot:
    """Parses a snapshot.

    Raises:
        ValueError: `body` is not a snapshot.
    """
    return decode_untrusted(_decoder.decode, body)


def job_snapshot_of(snapshots: Iterable[MachineSnapshot], word: str = "rank") -> JobSnapshot:
    """Merges snapshots that several machines took at the same time, possibly with different clocks."""
    ranks = [shifted(rank, -snapshot.taken_s) for snapshot in snapshots for rank in snapshot.ranks]
    return JobSnapshot(0.0, tuple(sorted(ranks, key=lambda rank: rank.rank)), word)


def snapshot_if_stalled(
    workers: Sequence[WatchedWorker],
    patience: StallThreshold,
    is_requested: bool,
    look_s: float = LOOK_S,
    may_be_idle: bool = False,
) -> MachineSnapshot | None:
    """Takes a snapshot over `look_s` seconds, or returns None if no call is overdue and the ranks are not idle.

    Args:
        workers: the workers on this machine.
        patience: the threshold for overdue calls; it applies at the end of the snapshot.
        is_requested: whether to take the snapshot even if no call is overdue.
        look_s: the time between the two samples of each process, in seconds.
        may_be_idle: whether to report idle ranks, because no worker has recorded anything for a long time.
    """
    soon = StallThreshold(patience.floor_s - look_s, patience.ceiling_s - look_s)
    if not is_requested and not may_be_idle and not any(_waits_too_long(worker, soon) for worker in workers):
        return None
    began_s = time.monotonic()
    first = {worker.pid: worker_process.sample(worker.pid) for worker in workers}
    before = {worker.pid: _stack(worker.pid, first[worker.pid]) for worker in workers}
    time.sleep(max(0.0, began_s + look_s - time.monotonic()))
    ranks = []
    for worker in workers:
        process = worker_process.between(first[worker.pid], last := worker_process.sample(worker.pid))
        frames, earlier = _stack(worker.pid, last), before[worker.pid]
        moves = bool(frames and earlier) and frames != earlier  # a stack that was not received in time is empty
        is_still = process.state in STILL
        ranks.append(worker_state(worker, replace(process, moves=moves), frames or (() if is_still else earlier)))
    snapshot = MachineSnapshot(time.monotonic(), tuple(ranks), _stalled_since_s(ranks, soon, may_be_idle))
    return snapshot if is_requested or snapshot.stalled_since_s is not None else None


def _waits_too_long(worker: WatchedWorker, patience: StallThreshold) -> bool:
    """Returns True if a worker is in an overdue call or wait. This check is cheap if the worker is in neither."""
    if worker.recording is None or not has_open_waits(worker.recording):
        return False
    return overdue_since_s(_recorded(worker), time.monotonic(), patience) is not None


def snapshot_ended_workers(workers: Sequence[WatchedWorker]) -> MachineSnapshot:
    """Builds a snapshot of exited workers from their recordings."""
    ranks = tuple(replace(_recorded(worker), ending=worker.ending, place=None) for worker in workers)
    return MachineSnapshot(time.monotonic(), ranks)


def worker_state(
    worker: WatchedWorker, process: ProcessActivity, frames: Sequence[Frame], most_calls: int = MOST_CALLS
) -> RankState:
    """Combines a worker's process activity, stack and recording into its state."""
    recorded = _recorded(worker, most_calls)
    place = worker_process.place_of(frames) or recorded.place
    if worker.ending is not None:
        return replace(recorded, ending=worker.ending, place=None)
    return replace(recorded, process=process, place=place, thread_error=_thread_error(worker))


def _thread_error(worker: WatchedWorker) -> str:
    """Returns the exception that ended one of a worker's threads, or ""."""
    with contextlib.suppress(OSError):
        if worker.thread_error_file:
            return Path(worker.thread_error_file).read_text(errors="replace")
    return ""


def _recorded(worker: WatchedWorker, most_calls: int = MOST_CALLS) -> RankState:
    with contextlib.suppress(NoRecordingError, OSError):
        if worker.recording is not None:
            recording = read_latest(worker.recording, most_calls, most_events=most_calls)
            return replace(rank_state_of(recording, worker.number), pid=worker.pid)
    return RankState(worker.number, os.uname().nodename, worker.pid)


def _stalled_since_s(ranks: Sequence[RankState], patience: StallThreshold, may_be_idle: bool) -> float | None:
    """Returns the start time of the longest overdue wait; if none, the time since which all ranks have been idle."""
    now_s = time.monotonic()
    began_s = [since_s for rank in ranks if (since_s := overdue_since_s(rank, now_s, patience)) is not None]
    if began_s:
        return min(began_s)
    is_stalled = may_be_idle and all(is_idle(rank) for rank in ranks)
    return max((rank.since_s or now_s for rank in ranks), default=None) if is_stalled else None


def _stack(pid: int, sample: worker_process.ProcessSample | None, timeout_s: float = 1.0) -> tuple[Frame, ...]:
    is_still = sample is None or worker_process.between(sample, sample).state in STILL
    return () if is_still else capture_stack(pid, timeout_s)
