"""Snapshot of this machine's workers, taken just after a worker of the job has failed and before other workers exit.

A failure must be diagnosed within a second. All stacks are therefore captured first, in parallel. The modules that read
recordings are imported afterwards, unless `prepare` has already imported them.
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

_STACKS_S = 0.1  # time limit for all stacks together; short, because the processes may be about to exit
_MOST_STACKS = 8
_FEW_CALLS = 128  # calls per rank; covers a failed rank's last actions and the calls in which others are waiting


def prepare() -> None:
    """Imports in advance the modules needed to take and diagnose a snapshot."""
    import paceline.operate.diagnosis.diagnosis
    import paceline.operate.diagnosis.machine_snapshot  # noqa: F401


def snapshot_failed_job(workers: Sequence[WatchedWorker], is_deep: bool = False) -> MachineSnapshot | None:
    """Takes a snapshot with a single sample of each process; returns None if no worker has recorded a call.

    Stacks are captured from a few workers only, because the other workers are waiting at the same lines.

    Args:
        workers: the workers on this machine.
        is_deep: whether to include many calls per worker, as required to diagnose mismatched calls.
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
    """Returns the snapshot, updated with the workers that have exited since it was taken."""
    endings = {worker.pid: worker.ending for worker in workers if worker.ending is not None}

    def with_ending(rank: RankState) -> RankState:
        if rank.ending is not None or rank.pid not in endings:
            return rank
        return replace(rank, ending=endings[rank.pid], place=None, process=None)

    return replace(snapshot, ranks=tuple(map(with_ending, snapshot.ranks)))
