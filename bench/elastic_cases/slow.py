"""Stops or slows down workers, and measures when the others continue and which workers are excluded."""

from __future__ import annotations

import contextlib
import signal
from random import Random

from elastic_cases import jobs, timeline
from elastic_cases.churn import Churn, disturb
from elastic_cases.options import Options, Rows
from elastic_cases.pauses import Figures, distribution

_TIMES = 10  # how many times slower than the others
_STEPS_OF_THE_SLOW = 100


def measure(options: Options) -> tuple[str, Rows]:
    """Returns the table for the frozen worker and the slow worker."""
    return "a worker that is stopped, and one that is slow", [_frozen(options), _slow(options)]


def _frozen(options: Options) -> dict[str, object]:
    figures, random, equal = Figures(), Random(options.seed), True
    digest = jobs.undisturbed_digest(options.steps)
    while figures.deaths < options.few:
        churn = Churn(options.workers, options.steps, options.few - figures.deaths, signal=signal.SIGSTOP)
        with contextlib.closing(jobs.elastic(options.workers, options.steps)) as job:
            stops = disturb(job, churn, random)
            figures.add(timeline.read(job.directory), stops, churn.workers, churn.steps)
            equal = equal and {result["digest"] for result in jobs.results_of(job.directory)} == {digest}
    return {
        "worker": "stopped (SIGSTOP)",
        **distribution(figures.at_death, "others' pause"),
        "left out": figures.deaths,
        "step ms": max(figures.steps),
        "digest": "equal" if equal else "DIFFERENT",
    }


def _slow(options: Options) -> dict[str, object]:
    figures, digest = Figures(), jobs.undisturbed_digest(_STEPS_OF_THE_SLOW)
    times = [str(_TIMES), *["1"] * (options.workers - 1)]
    churn = Churn(options.workers, _STEPS_OF_THE_SLOW, 0)
    with contextlib.closing(jobs.elastic(options.workers, churn.steps, "--times", *times)) as job:
        disturb(job, churn, Random(options.seed))
        figures.add(timeline.read(job.directory), [], churn.workers, churn.steps)
        results = jobs.results_of(job.directory)
    equal = len(results) == options.workers and {result["digest"] for result in results} == {digest}
    return {
        "worker": f"{_TIMES} times slower for {churn.steps} steps",
        "left out": figures.restarted,
        "step ms": max(figures.steps),
        "digest": "equal" if equal else "DIFFERENT",
    }
