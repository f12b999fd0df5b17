"""Looks at the workers of this machine for an instant, since one of the job's has failed and the others end soon.

The verdict on a failure is due within a second. Therefore the stacks are taken first, all at the same time, and the
modules that read the recordings are imported after that, unless `prepare` has done it before.
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

_STACKS_S = 0.1  # for all of them: some processes may be about to end
_MOST_STACKS = 8
_FEW_CALLS = 128  # of each rank: they tell what a failed rank did last, and who waits where


def prepare() -> None:
    """Imports what a picture and its diagnosis need, ahead of time."""
    import paceline.operate.diagnosis.diagnosis
    import paceline.operate.diagnosis.machine_snapshot  # noqa: F401


def snapshot_failed_job(workers: Sequence[WatchedWorker], is_deep: bool = False) -> MachineSnapshot | None:
    """Returns what the workers do just now, without a second look; None if they have recorded no call.

    Only the stacks of a few are taken: they show in which line of the program the others wait.

    Args:
        workers: whom to look at.
        is_deep: whether many calls of each are wanted: it takes a loop's history to tell why calls do not fit together.
    """
    samples = {worker.pid: worker_process.sample(worker.pid) for worker in workers if worker.ending is None}
    now = {pid: worker_process.between(each, each) for pid, each in samples.items()}
    asked = [pid for pid, process in now.items() if process.state not in STILL]
    frames = capture_stacks(asked[:_MOST_STACKS], _STACKS_S)
    from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, worker_state
    from paceline.operate.diagnosis.recording_reader import MOST_CALLS

    most = MOST_CALLS if is_deep or any(_is_of_calls(worker) for worker in workers) else _FEW_CALLS
    ended = worker_process.between(None, None)
    ranks = [worker_state(each, now.get(each.pid, ended), frames.get(each.pid, ()), most) for each in workers]
    return MachineSnapshot(time.monotonic(), tuple(ranks)) if any(rank.calls for rank in ranks) else None


def with_endings(picture: MachineSnapshot, workers: Sequence[WatchedWorker]) -> MachineSnapshot:
    """Returns the picture with the ends of workers that have come to one meanwhile: their errors name their lines."""
    endings = {worker.pid: worker.ending for worker in workers if worker.ending is not None}

    def by_now(rank: RankState) -> RankState:
        if rank.ending is not None or rank.pid not in endings:
            return rank
        return replace(rank, ending=endings[rank.pid], place=None, process=None)

    return replace(picture, ranks=tuple(map(by_now, picture.ranks)))


def _is_of_calls(worker: WatchedWorker) -> bool:
    """Returns whether a worker failed since its calls do not fit those of the others."""
    return worker.ending is not None and worker.ending.manner is ExitReason.MISMATCH
