"""Kills a worker; measures how long the replacement takes to join and how much it slows down the other workers.

If all cores are busy, the other workers slow down whenever another process starts. As a lower bound for the slowdown,
the same loop runs alongside an unrelated process that uses the same share of a core as the replacements.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from hosts.network import Network

from elastic_cases import jobs, machines, stranger, timeline
from elastic_cases.churn import Churn, disturb
from elastic_cases.jobs import Job
from elastic_cases.options import Options, Rows
from elastic_cases.pauses import Figures, distribution

_STEPS = 400  # steps of a job, enough for a few seconds between deaths
_RATE = "1gbit"
_HOSTS = 2


def measure(options: Options) -> tuple[str, Rows]:
    """Returns the table for all sizes of the state, on one machine and on two."""
    rows: Rows = []
    for loop, script in _LOOPS.items():
        for mib in options.states:
            rows.append(_measure(loop, "one machine", mib, options, partial(_on_one_machine, script, mib, options), ()))
    if os.geteuid() != 0:
        return _TITLE, [*rows, {"where": f"two machines: {machines.NEEDS_ROOT}"}]
    per_host = options.workers // _HOSTS
    slots = tuple(range(per_host, _HOSTS * per_host))  # on the second host, because the first one sends the state
    with _network() as network:
        for loop, script in _LOOPS.items():
            for mib in options.states:
                start = partial(machines.elastic, network, per_host, _STEPS, "--ballast", str(mib), script=script)
                rows.append(_measure(loop, f"two machines, {_RATE}", mib, options, start, slots))
    return _TITLE, rows


_TITLE = "the replacement of a worker that was killed"
_LOOPS = {"shards": "train_shards.py", "usual": "train_usual.py"}


def _measure(
    loop: str, where: str, mib: int, options: Options, start: Callable[[], Job], slots: tuple[int, ...]
) -> dict[str, object]:
    figures, random = Figures(), Random(options.seed)
    while figures.deaths < options.few:
        churn = Churn(options.workers, _STEPS, options.few - figures.deaths, slots=slots)
        with contextlib.closing(start()) as job:
            kills = disturb(job, churn, random)
            processor_s = timeline.processor_seconds(job.directory)
            figures.add(timeline.read(job.directory), kills, churn.workers, churn.steps, processor_s)
    share = statistics.median(figures.shares) if figures.shares else 0.0
    with contextlib.closing(start()) as job:
        beside = stranger.slowdown(job, share)
    return {
        "loop": loop,
        "where": where,
        "state MiB": mib,
        **distribution(figures.joined, "takes part"),
        **distribution(figures.at_entry, "others' pause"),
        **distribution(figures.at_lesson, "pause while it learns"),
        "others' step meanwhile p50": statistics.median(figures.meanwhile) if figures.meanwhile else None,
        "others' step meanwhile": max(figures.meanwhile, default=None),
        "replacement's share of a core": share,
        "step beside a stranger": beside,
        "pause at the kill max ms": max(figures.at_death),
        "step ms": max(figures.steps),
    }


def _on_one_machine(script: str, mib: int, options: Options) -> Job:
    return jobs.elastic(options.workers, _STEPS, "--ballast", str(mib), script=script)


@contextlib.contextmanager
def _network() -> Iterator[Network]:
    network = Network(_HOSTS, 1, 1500, _RATE, None)
    with contextlib.closing(network):
        yield network
