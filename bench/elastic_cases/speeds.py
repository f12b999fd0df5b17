"""Compares the speed of a job whose workers have different speeds with the sum of these speeds.

The speed of a worker is measured in a separate job with the same limit. The jobs with one worker each run at the same
time, because cores that share caches slow each other down. They alternate with the job of all workers, several times.
"""

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
_CORES = 0.5  # share of a core at speed 1; with launchers and host interference, the total is below two cores
_SHARDS = (24, 48)  # shards per step; a step takes about half a second or one second
_ROUNDS = 3
_BATCH = 512  # samples per shard, enough for the computation to dominate the fixed cost of a step
_STEPS, _STEPS_ALONE = 80, 35  # the steps of a worker that trains alone take longer
_SETTLING, _SETTLING_ALONE = 30, 5  # steps excluded at the start, until speeds are known or everything is loaded
_PERIOD_US = 4_000  # one tick; a worker that has used up its share of a period does not respond until the next period
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def measure(options: Options) -> tuple[str, Rows]:
    """Returns the table, with a row for each number of shards."""
    with _limits() as cgroups:
        means = "by cgroups" if cgroups else "by waiting before each shard, since no cgroup can be made"
        return f"shards on workers of different speeds, limited {means}", [_row(shards, cgroups) for shards in _SHARDS]


def _row(shards: int, cgroups: Sequence[str]) -> dict[str, object]:
    slots = range(len(_SPEEDS))
    alone: list[list[float]] = []
    together: list[float] = []
    for _ in range(_ROUNDS):
        alone.append(_paces(shards, [_limited([slot], cgroups) for slot in slots]))
        together += _paces(shards, [_limited(slots, cgroups)])
    sums = [sum(paces) for paces in alone]
    ratios = [pace / total for pace, total in zip(together, sums, strict=True)]
    return {
        "speeds": " ".join(f"{speed:g}" for speed in _SPEEDS),
        "shards": shards,
        **{f"worker {slot} alone steps/s": statistics.median(paces[slot] for paces in alone) for slot in slots},
        "sum steps/s": statistics.median(sums),
        "together steps/s": statistics.median(together),
        "together / sum": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "n": len(ratios),
        "at the slowest's pace / sum": statistics.median(min(paces) * len(paces) / sum(paces) for paces in alone),
    }


def _limited(slots: Sequence[int], cgroups: Sequence[str]) -> list[str]:
    """Returns the options of a job whose workers have the speeds of these slots."""
    if cgroups:
        return ["--cgroups", *(cgroups[slot] for slot in slots)]
    return ["--times", *(f"{1 / _SPEEDS[slot]:g}" for slot in slots)]


def _paces(shards: int, limits: Sequence[list[str]]) -> list[float]:
    """Returns the steps per second of jobs that run at the same time, measured while all of them run undisturbed."""
    with contextlib.ExitStack() as running:
        started = [running.enter_context(contextlib.closing(_job(shards, words))) for words in limits]
        while not any(job.is_over() for job in started):
            time.sleep(0.1)
        notes = [timeline.read(job.directory) for job in started]
    settling = _SETTLING if len(limits) == 1 else _SETTLING_ALONE
    times = [sorted(note.at_ns for note in each if note.slot == 0 and note.step >= settling) for each in notes]
    from_ns, to_ns = max(each[0] for each in times), min(each[-1] for each in times)
    return [_pace([at_ns for at_ns in each if from_ns <= at_ns <= to_ns]) for each in times]


def _job(shards: int, limits: list[str]) -> jobs.Job:
    workers = len(limits) - 1
    steps = _STEPS_ALONE if workers == 1 else _STEPS
    return jobs.elastic(workers, steps, "--batch", str(_BATCH), "--no-tally", "--shards", str(shards), *limits)


def _pace(times_ns: Sequence[int]) -> float:
    return (len(times_ns) - 1) / (times_ns[-1] - times_ns[0]) * 1e9


@contextlib.contextmanager
def _limits() -> Iterator[list[str]]:
    """Yields the path of a cgroup with the right quota for each slot, or no paths if cgroups cannot be created."""
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
    """Returns a new cgroup whose processes get `quota_us` microseconds of each period.

    Raises:
        OSError: The kernel or its settings do not allow a new cgroup.
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
