"""A worker is killed and replaced: when does the replacement take part, and how long do the others wait for it?"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import TextIO

from hosts.namespaces import enter
from hosts.network import Network, ipv4

from elastic_cases import jobs, timeline
from elastic_cases.churn import Churn, disturb
from elastic_cases.jobs import ENVIRONMENT, HERE, Job, Launched, popen
from elastic_cases.options import Options, Rows
from elastic_cases.pauses import Figures, distribution

_STEPS = 400  # of a job; between two deaths there are some seconds
_RATE = "1gbit"
_HOSTS = 2


def measure(options: Options) -> tuple[str, Rows]:
    """Returns the table of all sizes of the state, on one machine and on two."""
    rows: Rows = []
    for mib in options.states:
        rows.append(_measure("one machine", mib, options, partial(_on_one_machine, mib, options), ()))
    if os.geteuid() != 0:
        return _TITLE, [*rows, {"where": "two machines: not measured, network namespaces need root"}]
    per_host = options.workers // _HOSTS
    slots = tuple(range(per_host, _HOSTS * per_host))  # of the second host, since the first one gives the state
    with _network() as network:
        for mib in options.states:
            start = partial(_on_two_machines, network, mib, per_host)
            rows.append(_measure(f"two machines, {_RATE}", mib, options, start, slots))
    return _TITLE, rows


_TITLE = "the replacement of a worker that was killed"


def _measure(
    where: str, mib: int, options: Options, start: Callable[[], Job], slots: tuple[int, ...]
) -> dict[str, object]:
    figures, random = Figures(), Random(options.seed)
    while figures.deaths < options.few:
        churn = Churn(options.workers, _STEPS, options.few - figures.deaths, slots=slots)
        with contextlib.closing(start()) as job:
            kills = disturb(job, churn, random)
            figures.add(timeline.read(job.directory), kills, churn.workers, churn.steps)
    return {
        "where": where,
        "state MiB": mib,
        **distribution(figures.joined, "takes part"),
        **distribution(figures.at_entry, "others' pause"),
        "pause at the kill max ms": max(figures.at_death),
        "step ms": max(figures.steps),
    }


def _on_one_machine(mib: int, options: Options) -> Job:
    return jobs.elastic(options.workers, _STEPS, "--ballast", str(mib))


@contextlib.contextmanager
def _network() -> Iterator[Network]:
    network = Network(_HOSTS, 1, 1500, _RATE, None)
    with contextlib.closing(network):
        yield network


def _on_two_machines(network: Network, mib: int, per_host: int) -> Job:
    launcher = [sys.executable, "-m", "paceline", "run", "--elastic", "--nproc-per-node", str(per_host)]
    meeting = ["--nnodes", str(_HOSTS), "--rdzv-endpoint", f"{ipv4(0)}:29400"]
    script = [str(HERE / "train_shards.py"), "{directory}", "--steps", str(_STEPS), "--ballast", str(mib)]
    command = [*launcher, *meeting, *script]
    environment = {**ENVIRONMENT, "PACELINE_SECRET": secrets.token_hex(16)}
    waiting = iter(network.hosts)

    def start(words: list[str], output: TextIO) -> subprocess.Popen[bytes]:
        host = next(waiting)

        def inside() -> subprocess.Popen[bytes]:
            enter(host)
            return popen(words, output, environment)

        with ThreadPoolExecutor(1) as thread:  # which enters the host, and not the benchmark
            return thread.submit(inside).result()

    return Launched(*[command] * _HOSTS, start=start)
