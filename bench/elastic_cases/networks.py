"""Measures jobs on several machines whose network is partitioned, or so slow that data queues up."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

from hosts.network import Network
from hosts.wire import Conditions

from elastic_cases import jobs, machines, timeline
from elastic_cases.options import Options, Rows
from elastic_cases.pauses import distribution

_HOSTS, _MINORITY = 5, 2
_STEPS_OF_A_CUT = 120
_CUT_AFTER = 40  # steps
_IN_FLIGHT_S = 0.2  # messages in flight when the link was cut may still lead to a commit
_RATE = "10mbit"
_THIN_HOSTS, _PER_HOST = 2, 2
_STEPS_OF_THIN = 40
_DEADLINE_S = 300.0
_POLL_S = 0.01


def measure_partition(options: Options) -> tuple[str, Rows]:
    """Returns the table for five machines that are repeatedly partitioned into three and two."""
    title = f"{_HOSTS} machines that are cut into {_HOSTS - _MINORITY} and {_MINORITY}"
    if os.geteuid() != 0:
        return title, [{"side": machines.NEEDS_ROOT}]
    digest = jobs.undisturbed_digest(_STEPS_OF_A_CUT, _HOSTS)
    pauses: list[float] = []
    late, equal, cuts = 0, 0, max(1, options.few // 4)
    for number in range(cuts):
        pause_ms, late_commits, digests = _cut(number)
        pauses += pause_ms
        late += late_commits
        equal += digests == {digest}
    row = {
        "cuts": cuts,
        **distribution(pauses, "majority's pause"),
        "commits of the minority": late,
        "digest equal": f"{equal} of {cuts}",
    }
    return title, [row]


def _cut(number: int) -> tuple[list[float], int, set[object]]:
    """Partitions one job's network; returns the majority's pauses, the minority's later commits and the final digests.

    The coordinating machine is always in the majority. The other machines in the majority differ between partitions.
    """
    minority = {1 + (number + each) % (_HOSTS - 1) for each in range(_MINORITY)}
    majority = set(range(_HOSTS)) - minority
    with contextlib.closing(Network(_HOSTS, 1, 1500, None, Conditions())) as network:
        assert network.bridge is not None
        shards, nnodes = ("--shards", str(_HOSTS)), f"1:{_HOSTS}"
        with contextlib.closing(machines.elastic(network, 1, _STEPS_OF_A_CUT, *shards, nnodes=nnodes)) as job:
            until(job, lambda: furthest(job, _HOSTS) >= _CUT_AFTER)
            pairs = frozenset((low, high) for low in range(_HOSTS) for high in range(low + 1, _HOSTS))
            between = frozenset(pair for pair in pairs if len(minority.intersection(pair)) == 1)
            network.bridge.set(Conditions(cut=between))
            cut_ns = time.monotonic_ns()
            until(job, lambda: len(jobs.results_of(job.directory)) >= len(majority))
            notes = timeline.read(job.directory)
            digests = {result["digest"] for result in jobs.results_of(job.directory)}
    finished = {note.pid for note in notes if note.step == _STEPS_OF_A_CUT}
    pauses, late = [], 0
    for pid in {note.pid for note in notes}:
        times_ns = [note.at_ns for note in notes if note.pid == pid]
        if pid in finished:
            gaps = [(after - before) / 1e6 for before, after in pairwise(times_ns)]
            pauses.append(max(gaps) - statistics.median(gaps))
        else:
            late += sum(at_ns > cut_ns + _IN_FLIGHT_S * 1e9 for at_ns in times_ns)
    return pauses, late, digests


def measure_thin(options: Options) -> tuple[str, Rows]:
    """Returns the table for a job whose gradients occupy a slow link most of the time."""
    del options
    title = f"{_THIN_HOSTS} machines, {_PER_HOST} workers each, with {_RATE} between them"
    if os.geteuid() != 0:
        return title, [{"workers": machines.NEEDS_ROOT}]
    digest = jobs.undisturbed_digest(_STEPS_OF_THIN)
    workers = _THIN_HOSTS * _PER_HOST
    with (
        contextlib.closing(Network(_THIN_HOSTS, 1, 1500, _RATE, None)) as network,
        contextlib.closing(machines.elastic(network, _PER_HOST, _STEPS_OF_THIN)) as job,
    ):
        until(job, job.is_over)
        notes = timeline.read(job.directory)
        digests = [result["digest"] for result in jobs.results_of(job.directory)]
    gaps = [
        (after - before) / 1e6
        for pid in {note.pid for note in notes}
        for before, after in pairwise(note.at_ns for note in notes if note.pid == pid)
    ]
    row = {
        "workers": workers,
        **distribution(gaps, "step"),
        "expelled": len({note.pid for note in notes}) - workers,
        "digest": "equal" if len(digests) == workers and set(digests) == {digest} else "DIFFERENT",
    }
    return title, [row]


def furthest(job: jobs.Launched, workers: int) -> int:
    """Returns the latest step that all `workers` workers have committed, or 0 if some have not committed any."""
    notes = timeline.latest(job.directory)
    return min(note.step for note in notes) if len(notes) == workers else 0


def until(job: jobs.Launched, is_done: Callable[[], bool]) -> None:
    """Waits for a condition.

    Raises:
        TimeoutError: The condition is not met in time.
    """
    deadline_s = time.monotonic() + _DEADLINE_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the job does not get on; it has printed:\n{job.output()[-3000:]}")
        time.sleep(_POLL_S)
