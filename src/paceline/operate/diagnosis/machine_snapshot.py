"""Looks at the workers of this machine: their recordings, their stacks, and what the kernel says of them.

What one machine knows of its ranks at one moment, as JSON that launchers send each other and keep.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from paceline.comm.security.untrusted_peers import decode_untrusted
from paceline.operate.diagnosis import worker_process
from paceline.operate.diagnosis.clock_offset import shifted
from paceline.operate.diagnosis.job_snapshot import STILL, Frame, JobSnapshot, ProcessActivity, RankCall, RankState
from paceline.operate.diagnosis.recording_reader import (
    MOST_CALLS,
    NoRecordingError,
    has_open_calls,
    rank_state_of,
    read_latest,
)
from paceline.operate.diagnosis.stall_detector import LOOK_S, StallThreshold, WatchedWorker, overdue
from paceline.operate.diagnosis.worker_process import capture_stack

_MOST_CALLS = 8192  # of all ranks of a machine together that are sent to another one


@dataclass(frozen=True)
class MachineSnapshot:
    """The ranks of one machine.

    Attributes:
        taken_s: the time on the machine's monotonic clock, of which all times in `ranks` are.
        stalled_since_s: since when a call of one of them lasts too long; None if none does.
    """

    taken_s: float
    ranks: tuple[RankState, ...]
    stalled_since_s: float | None = None


# It is made here, where no two threads can make it at the same time: that crashes msgspec 0.22.
_decoder = msgspec.json.Decoder(MachineSnapshot)


def encode(picture: MachineSnapshot) -> str:
    """Returns the picture as JSON, with as many calls as another machine needs."""
    most = _MOST_CALLS // max(8, len(picture.ranks))
    short = tuple(replace(rank, calls=_latest(rank.calls, most)) for rank in picture.ranks)
    return msgspec.json.encode(replace(picture, ranks=short)).decode()


def _latest(calls: tuple[RankCall, ...], most: int) -> tuple[RankCall, ...]:
    """Returns the latest calls, and earlier ones that are not over."""
    return (*(call for call in calls[:-most] if call.ended_s is None), *calls[-most:])


def decode(body: str) -> MachineSnapshot:
    """Returns the picture in `body`.

    Raises:
        ValueError: there is none.
    """
    return decode_untrusted(_decoder.decode, body)


def job_snapshot_of(pictures: Iterable[MachineSnapshot], word: str = "rank") -> JobSnapshot:
    """Returns the scene that pictures of several machines show, which were taken at the same time.

    Their clocks may differ; "now" is the same in all of them.
    """
    ranks = [shifted(rank, -picture.taken_s) for picture in pictures for rank in picture.ranks]
    return JobSnapshot(0.0, tuple(sorted(ranks, key=lambda rank: rank.rank)), word)


def snapshot_if_stalled(
    workers: Sequence[WatchedWorker], patience: StallThreshold, is_asked: bool, look_s: float = LOOK_S
) -> MachineSnapshot | None:
    """Returns what the workers do; takes `look_s`, except that it returns None at once if none of them waits too long.

    Args:
        workers: whom to look at.
        patience: how long a call may last. It may last `look_s` longer when the picture is there.
        is_asked: whether the picture is needed in any case.
        look_s: for how long.
    """
    soon = StallThreshold(patience.floor_s - look_s, patience.ceiling_s - look_s)
    if not is_asked and not any(_waits_too_long(worker, soon) for worker in workers):
        return None
    began_s = time.monotonic()
    first = {worker.pid: worker_process.sample(worker.pid) for worker in workers}
    before = {worker.pid: _stack(worker.pid, first[worker.pid]) for worker in workers}
    time.sleep(max(0.0, began_s + look_s - time.monotonic()))
    ranks = []
    for worker in workers:
        process = worker_process.between(first[worker.pid], last := worker_process.sample(worker.pid))
        frames, earlier = _stack(worker.pid, last), before[worker.pid]
        moves = bool(frames and earlier) and frames != earlier  # a stack that did not come in time says nothing
        is_still = process.state in STILL
        ranks.append(worker_state(worker, replace(process, moves=moves), frames or (() if is_still else earlier)))
    return MachineSnapshot(time.monotonic(), tuple(ranks), _stalled_since_s(ranks, soon))


def _waits_too_long(worker: WatchedWorker, patience: StallThreshold) -> bool:
    """Returns whether a worker is in a call that lasts too long; quickly, if it is in none."""
    if worker.recording is None or not has_open_calls(worker.recording):
        return False
    return overdue(_recorded(worker), time.monotonic(), patience) is not None


def snapshot_ended_workers(workers: Sequence[WatchedWorker]) -> MachineSnapshot:
    """Returns what the recordings of workers say that have ended."""
    return MachineSnapshot(
        time.monotonic(), tuple(replace(_recorded(each), ending=each.ending, place=None) for each in workers)
    )


def worker_state(
    worker: WatchedWorker, process: ProcessActivity, frames: Sequence[Frame], most_calls: int = MOST_CALLS
) -> RankState:
    """Returns what is known of a worker with this process and stack, with its latest calls."""
    recorded = _recorded(worker, most_calls)
    place = worker_process.place_of(frames) or recorded.place
    if worker.ending is not None:
        return replace(recorded, ending=worker.ending, place=None)
    return replace(recorded, process=process, place=place)


def _recorded(worker: WatchedWorker, most_calls: int = MOST_CALLS) -> RankState:
    with contextlib.suppress(NoRecordingError, OSError):
        if worker.recording is not None:
            recording = read_latest(worker.recording, most_calls, most_events=most_calls)
            return replace(rank_state_of(recording, worker.number), pid=worker.pid)
    return RankState(worker.number, os.uname().nodename, worker.pid)


def _stalled_since_s(ranks: Sequence[RankState], patience: StallThreshold) -> float | None:
    """Returns when the call began that lasts longest of those that last too long."""
    now_s = time.monotonic()
    calls = [call for rank in ranks if (call := overdue(rank, now_s, patience)) is not None]
    return min((call.arrived_s for call in calls), default=None)


def _stack(pid: int, sample: worker_process.ProcessSample | None, timeout_s: float = 1.0) -> tuple[Frame, ...]:
    is_still = sample is None or worker_process.between(sample, sample).state in STILL
    return () if is_still else capture_stack(pid, timeout_s)
