"""Snapshot of this machine's workers just after a worker of the job failed, before the others end.

The diagnosis of a failure is due within a second. Therefore the stacks are taken first, all at the same time, and the
modules that read recordings are imported afterwards, unless `prepare` has imported them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.operate.diagnosis import worker_process
from paceline.operate.diagnosis.job_snapshot import STILL, ExitReason, RankState
from paceline.operate.diagnosis.worker_process import capture_stacks

if TYPE_CHECKING:
    from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot
    from paceline.operate.diagnosis.stall_detector import WatchedWorker

_STACKS_S = 0.1  # the time for all stacks together; some processes may be about to end
_MOST_STACKS = 8
_FEW_CALLS = 128  # per rank: enough for the last actions of a failed rank and for the waits of the others


def prepare() -> None:
    """Imports the modules for a snapshot and its diagnosis ahead of time."""
    import paceline.operate.diagnosis.diagnosis
    import paceline.operate.diagnosis.machine_snapshot  # noqa: F401


def snapshot_failed_job(workers: Sequence[WatchedWorker], is_deep: bool = False) -> MachineSnapshot | None:
    """Takes a snapshot from a single sample of each process; returns None if the workers have recorded no call.

    Only the stacks of a few workers are taken, since the others wait at the same lines.

    Args:
        workers: the workers of this machine.
        is_deep: whether to include many calls of each worker, which the diagnosis of mismatched calls requires.
    """
    samples = {worker.pid: worker_process.sample(worker.pid) for worker in workers if worker.ending is None}
    now = {pid: worker_process.between(sample, sample) for pid, sample in samples.items()}
    awake = [pid for pid, process in now.items() if process.state not in STILL]
    frames = capture_stacks(awake[:_MOST_STACKS], _STACKS_S)
    from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, worker_state
    from paceline.operate.diagnosis.recording_reader import MOST_CALLS

    is_mismatch = any(worker.ending and worker.ending.manner is ExitReason.MISMATCH for worker in workers)
    most = MOST_CALLS if is_deep or is_mismatch else _FEW_CALLS
    ended = worker_process.between(None, None)
    ranks = [worker_state(worker, now.get(worker.pid, ended), frames.get(worker.pid, ()), most) for worker in workers]
    return MachineSnapshot(time.monotonic(), tuple(ranks)) if any(rank.calls for rank in ranks) else None


def with_endings(snapshot: MachineSnapshot, workers: Sequence[WatchedWorker]) -> MachineSnapshot:
    """Returns the snapshot with the ends of workers that have ended since then."""
    endings = {worker.pid: worker.ending for worker in workers if worker.ending is not None}

    def with_ending(rank: RankState) -> RankState:
        if rank.ending is not None or rank.pid not in endings:
            return rank
        return replace(rank, ending=endings[rank.pid], place=None, process=None)

    return replace(snapshot, ranks=tuple(map(with_ending, snapshot.ranks)))
