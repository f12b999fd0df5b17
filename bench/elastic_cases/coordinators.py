"""Measures how long jobs on several machines pause when they lose the coordinating launcher or the connection to it."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

from hosts.network import Network
from hosts.resetting import reset_connections

from elastic_cases import jobs, machines, timeline
from elastic_cases.networks import furthest, until
from elastic_cases.options import Options, Rows
from elastic_cases.pauses import distribution

_HOSTS = 3
_STEPS = 150
_AFTER = 40  # steps
_SAYS = "coordinates from now on"


def measure(options: Options) -> tuple[str, Rows]:
    """Returns the table for jobs that lose the coordinating machine, or the connection to it."""
    title = f"{_HOSTS} machines with a worker each, and the launcher that coordinates them"
    if os.geteuid() != 0:
        return title, [{"event": machines.NEEDS_ROOT}]
    digest = jobs.undisturbed_digest(_STEPS, _HOSTS)
    times = max(1, options.few // 4)
    events: dict[str, Callable[[jobs.Launched], None]] = {
        "its launcher is killed": _kill,
        "a connection is reset": _reset,
    }
    return title, [_row(event, does, times, digest) for event, does in events.items()]


def _row(event: str, does: Callable[[jobs.Launched], None], times: int, digest: str) -> dict[str, object]:
    pauses: list[float] = []
    found: list[float] = []
    equal = 0
    for _ in range(times):
        pause_ms, found_ms, digests = _disturbed(does)
        pauses += pause_ms
        found += found_ms
        equal += digests == {digest}
    seen = {"new coordinator ms": round(max(found))} if found else {}
    return {"event": event, "times": times, **distribution(pauses, "longest pause"), **seen, "digest equal": equal}


def _disturbed(does: Callable[[jobs.Launched], None]) -> tuple[list[float], list[float], set[object]]:
    """Returns the longest pause of each survivor, the time until there is a new coordinator, and the final digests."""
    network = Network(_HOSTS, 1, 1500, None, None)
    with (
        contextlib.closing(network),
        contextlib.closing(machines.elastic(network, 1, _STEPS, "--shards", str(_HOSTS))) as job,
    ):
        until(job, lambda: furthest(job, _HOSTS) >= _AFTER)
        began_s = time.monotonic()
        does(job)
        found = []
        if does is _kill:
            until(job, lambda: _SAYS in job.output())
            found.append(1000 * (time.monotonic() - began_s))
        left = _HOSTS - (does is _kill)
        until(job, lambda: len(jobs.results_of(job.directory)) >= left)
        notes = timeline.read(job.directory)
        digests = {result["digest"] for result in jobs.results_of(job.directory)}
    pauses = []
    for pid in {note.pid for note in notes if note.step == _STEPS}:
        gaps = [(after - before) / 1e6 for before, after in pairwise(n.at_ns for n in notes if n.pid == pid)]
        pauses.append(max(gaps) - statistics.median(gaps))
    return pauses, found, digests


def _kill(job: jobs.Launched) -> None:
    job.launchers[0].send_signal(signal.SIGKILL)


def _reset(job: jobs.Launched) -> None:
    reset_connections(job.launchers[1].pid)
