"""Looks at the workers of this machine for an instant, since one of the job's has failed and the others end soon.

The verdict on a failure is due within a second. Therefore the stacks are taken first, all at the same time, and the
modules that read the recordings are imported after that, unless `prepare` has done it before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.observe import processes
from paceline.observe.evidence import STILL, Manner, Rank
from paceline.observe.taking import take_all

if TYPE_CHECKING:
    from paceline.observe.picture import Picture
    from paceline.observe.watching import Watched

_STACKS_S = 0.1  # for all of them: some processes may be about to end
_MOST_STACKS = 8
_FEW_CALLS = 128  # of each rank: they tell what a failed rank did last, and who waits where


def prepare() -> None:
    """Imports what a picture and its diagnosis need, ahead of time."""
    import paceline.observe.diagnosis
    import paceline.observe.looking  # noqa: F401


def glance(workers: Sequence[Watched], is_deep: bool = False) -> Picture | None:
    """Returns what the workers do just now, without a second look; None if they have recorded no call.

    Only the stacks of a few are taken: they show in which line of the program the others wait.

    Args:
        workers: whom to look at.
        is_deep: whether many calls of each are wanted: it takes a loop's history to tell why calls do not fit together.
    """
    samples = {worker.pid: processes.sample(worker.pid) for worker in workers if worker.ending is None}
    now = {pid: processes.between(each, each) for pid, each in samples.items()}
    asked = [pid for pid, process in now.items() if process.state not in STILL]
    frames = take_all(asked[:_MOST_STACKS], _STACKS_S)
    from paceline.observe.looking import seen
    from paceline.observe.picture import Picture
    from paceline.observe.witnesses import MOST_CALLS

    most = MOST_CALLS if is_deep or any(_is_of_calls(worker) for worker in workers) else _FEW_CALLS
    ended = processes.between(None, None)
    ranks = [seen(each, now.get(each.pid, ended), frames.get(each.pid, ()), most) for each in workers]
    return Picture(time.monotonic(), tuple(ranks)) if any(rank.calls for rank in ranks) else None


def with_endings(picture: Picture, workers: Sequence[Watched]) -> Picture:
    """Returns the picture with the ends of workers that have come to one meanwhile: their errors name their lines."""
    endings = {worker.pid: worker.ending for worker in workers if worker.ending is not None}

    def by_now(rank: Rank) -> Rank:
        if rank.ending is not None or rank.pid not in endings:
            return rank
        return replace(rank, ending=endings[rank.pid], place=None, process=None)

    return replace(picture, ranks=tuple(map(by_now, picture.ranks)))


def _is_of_calls(worker: Watched) -> bool:
    """Returns whether a worker failed since its calls do not fit those of the others."""
    return worker.ending is not None and worker.ending.manner is Manner.MISMATCH
