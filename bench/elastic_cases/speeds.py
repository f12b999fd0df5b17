"""Workers of different speeds: what share of the sum of their speeds do they train with?"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_cases import jobs, timeline
from elastic_cases.options import Options, Rows

_SPEEDS = (1.0, 1.0, 0.5, 0.5)
_CORES = 0.6  # of a worker of speed 1: all of them together are to need less than two cores
_SHARDS = 12
_BATCH = 512  # samples of a shard, which make its computation long beside what each worker does once a step
_STEPS, _STEPS_ALONE = 90, 45
_SETTLING = 30  # steps, until the speeds are known
_PERIOD_US = 10_000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def measure(options: Options) -> tuple[str, Rows]:
    """Returns the table; the speed of a worker is that of a job of its own, with the same limit."""
    with _limits() as cgroups:
        means = "by cgroups" if cgroups else "by waiting before each shard, since no cgroup can be made"
        alone = {}
        for slot in (0, len(_SPEEDS) - 1):
            alone[_SPEEDS[slot]] = _steps_a_second(_limited(slots=[slot], cgroups=cgroups))
        total = sum(alone[speed] for speed in _SPEEDS)
        together = _steps_a_second(_limited(slots=list(range(len(_SPEEDS))), cgroups=cgroups))
    slowest = min(alone.values())
    row = {
        "speeds": " ".join(f"{speed:g}" for speed in _SPEEDS),
        "1 alone steps/s": alone[1.0],
        "1/2 alone steps/s": alone[0.5],
        "sum steps/s": total,
        "together steps/s": together,
        "together / sum": together / total,
        "at the slowest's pace / sum": slowest * len(_SPEEDS) / total,
    }
    return f"{_SHARDS} shards on workers of different speeds, limited {means}", [row]


def _limited(slots: Sequence[int], cgroups: Sequence[str]) -> list[str]:
    if cgroups:
        return ["--cgroups", *(cgroups[slot] for slot in slots)]
    return ["--times", *(f"{1 / _SPEEDS[slot]:g}" for slot in slots)]


def _steps_a_second(limits: list[str]) -> float:
    """Returns the pace of a job with a worker for each limit, after the first steps."""
    workers = len(limits) - 1
    steps = _STEPS_ALONE if workers == 1 else _STEPS
    with contextlib.closing(
        jobs.elastic(workers, steps, "--batch", str(_BATCH), "--no-tally", "--shards", str(_SHARDS), *limits)
    ) as job:
        while not job.is_over():
            time.sleep(0.1)
        notes = timeline.read(job.directory)
    paces = []
    for slot in range(workers):
        times_ns = [note.at_ns for note in notes if note.slot == slot and note.step >= _SETTLING]
        paces.append((len(times_ns) - 1) / (times_ns[-1] - times_ns[0]) * 1e9)
    return statistics.median(paces)


@contextlib.contextmanager
def _limits() -> Iterator[list[str]]:
    """Yields a cgroup for each slot with the quota that its speed means; none if they cannot be made."""
    made: list[Path] = []
    try:
        with contextlib.suppress(OSError):
            for speed in _SPEEDS:
                made.append(_limit(round(speed * _CORES * _PERIOD_US)))
        yield [str(path) for path in made] if len(made) == len(_SPEEDS) else []
    finally:
        for path in made:
            path.rmdir()


def _limit(quota_us: int) -> Path:
    """Returns a new cgroup whose processes get so many microseconds of each period.

    Raises:
        OSError: the kernel or its settings do not allow it.
    """
    root = _V1 if (_V1 / "cpu.cfs_quota_us").exists() else _V2
    path = root / f"paceline-bench-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        if root == _V1:
            (path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (path / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (path / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    except OSError:
        path.rmdir()
        raise
    return path
