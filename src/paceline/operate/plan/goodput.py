"""Goodput: the fraction of time that a job spends on useful work when workers and machines fail.

An elastic job is simulated in virtual time with the launcher's real coordinator (`simulated_job.py`). For a job that
restarts from checkpoints, Daly's closed form applies ("A higher order estimate of the optimum checkpoint interval for
restart dumps", 2006). This module also formats the results as a table and parses times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from paceline.comm.schedule.algorithms import format_seconds
from paceline.operate.plan.formatting import aligned
from paceline.operate.plan.simulated_job import EventTimes, JobOutcome, MeanTimesBetweenFailures, SimulatedJob

_NEVER_S = 1e12
_MOST_MACHINES, _MOST_PER_MACHINE = 16, 2
"""Limits on the numbers of machines and of workers per machine to simulate. In larger jobs, each represents several."""

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|h|d)")
_SHARES = ("slowness", "replaying")  # fields of EventTimes that are ratios, not durations


@dataclass(frozen=True)
class Goodput:
    """The goodput of one job.

    Attributes:
        nodes: the number of machines.
        failures_per_day: the number of failures of workers and machines per day, excluding failures of the whole job.
        pause_s: the median and the 95th percentile of the delay per failure in an elastic job, in seconds.
        elastic: the fraction of time that an elastic job spends on steps rather than on checkpoints and failures.
        elastic_period_s: the optimal interval between checkpoints of an elastic job, in seconds; infinite if no
            checkpoints are needed.
        restarting: the fraction of time that a job spends on steps if every failure restarts it from a checkpoint.
        restarting_period_s: the optimal interval between checkpoints of a restarting job, in seconds.
        lost: the number of simulated jobs that lost the training state because every worker that held the state died.
        played: the total number of simulated jobs.
    """

    nodes: int
    failures_per_day: float
    pause_s: tuple[float, float]
    elastic: float
    elastic_period_s: float
    restarting: float
    restarting_period_s: float
    lost: int
    played: int


def goodput(
    nodes: int,
    per_node: int,
    times: EventTimes,
    failures: MeanTimesBetweenFailures,
    *,
    jobs: int = 8,
    failures_of_job: int = 25,
) -> Goodput:
    """Computes the goodput of a job by simulating it `jobs` times.

    Raises:
        ValueError: a time is out of range; the message names the field.
    """
    if (problem := times.problem()) is not None:
        raise ValueError(problem)
    rate = failures.rate(nodes, per_node)
    played = [play(nodes, per_node, times, failures, seed, failures_of_job) for seed in range(jobs)] if rate else []
    seconds = sum(job.seconds for job in played)
    lost = sum(job.is_lost for job in played)
    progress = sum(job.steps for job in played) * times.step_s / seconds if seconds else 1.0
    outage = 1 / failures.job_s if failures.job_s else 0.0
    if seconds:
        outage += lost / seconds
    elastic_period_s = best_period_s(times.saving_s, 1 / outage if outage else 0.0)
    restarting_period_s = best_period_s(times.saving_s, 1 / (rate + outage) if rate + outage else 0.0)
    return Goodput(
        nodes,
        rate * 86_400,
        _spread([pause_s for job in played for pause_s in job.pauses_s]),
        min(1.0, progress) * share_with_restarts(elastic_period_s, times.saving_s, times.restarting_s, outage),
        elastic_period_s,
        share_with_restarts(restarting_period_s, times.saving_s, times.restarting_s, rate + outage),
        restarting_period_s,
        lost,
        len(played),
    )


def play(
    nodes: int, per_node: int, times: EventTimes, failures: MeanTimesBetweenFailures, seed: int, most: int
) -> JobOutcome:
    """Simulates a job until `most` failures have occurred."""
    machines, per_machine = min(nodes, _MOST_MACHINES), min(per_node, _MOST_PER_MACHINE)
    fold, workers = nodes / machines, nodes * per_node
    scaled = MeanTimesBetweenFailures(failures.worker_s * machines * per_machine / workers, failures.machine_s / fold)
    return SimulatedJob(machines, per_machine, times, scaled, seed, share=1 / workers).play(most)


def partition(nodes: int, away: int, times: EventTimes) -> JobOutcome:
    """Simulates a network partition that cuts off `away` of the nodes from the coordinator.

    Returns:
        The outcome. If one side of the partition continues, `pauses_s` has one entry; otherwise it is empty and `end`
        gives the reason.
    """
    machines = min(nodes, _MOST_MACHINES)
    cut = round(away * machines / nodes)
    cut = min(max(cut, 1), machines - 1)
    job = SimulatedJob(machines, 1, replace(times, repair_s=_NEVER_S), MeanTimesBetweenFailures(machine_s=0.0), 0)
    return job.partition(cut)


def best_period_s(saving_s: float, between_s: float) -> float:
    """Returns the optimal amount of work between two checkpoints, in seconds (Young 1974, Daly 2006).

    Args:
        saving_s: the time by which a checkpoint delays training, in seconds.
        between_s: the mean time between failures after which the newest checkpoint must be loaded, in seconds; 0 if
            there are no such failures.
    """
    if not between_s:
        return math.inf
    if saving_s >= 2 * between_s:
        return between_s
    ratio = saving_s / (2 * between_s)
    return max(math.sqrt(2 * saving_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - saving_s, 1e-9)


def share_with_restarts(period_s: float, saving_s: float, restarting_s: float, rate: float) -> float:
    """Returns the fraction of time that a restarting job spends on work if failures are a Poisson process (Daly 2006).

    Args:
        period_s: the amount of work between two checkpoints, in seconds; infinite without checkpoints. saving_s: the
            time by which a checkpoint delays training, in seconds. restarting_s: the time until the job computes again
            after a failure, in seconds; a failure can also interrupt the restart.
        rate: the number of failures per second.
    """
    if not rate:
        return 1.0 if math.isinf(period_s) else period_s / (period_s + saving_s)
    if math.isinf(period_s):
        return 0.0
    exponent = rate * (period_s + saving_s)
    if exponent > 500 or rate * restarting_s > 500:
        return 0.0
    return rate * period_s / (math.exp(rate * restarting_s) * math.expm1(exponent))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    if not ordered:
        return (0.0, 0.0)
    return (ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))])


def parse_failures(text: str) -> MeanTimesBetweenFailures:
    """Parses mean times between failures such as `machine=30d,worker=90d,job=60d`; omitted values are 0 (never).

    Raises:
        ValueError: a part is malformed or has an unknown name.
    """
    given = _parts(text, ("worker", "machine", "job"), "--failures")
    return MeanTimesBetweenFailures(
        *(_seconds(given[name], text) if name in given else 0.0 for name in ("worker", "machine", "job"))
    )


def parse_times(text: str, times: EventTimes) -> EventTimes:
    """Parses changes to the times, such as `repair=10min,saving=2s,slowness=1.2`, and applies them.

    Raises:
        ValueError: a part is malformed or has an unknown name.
    """
    names = {field.name.removesuffix("_s"): field.name for field in fields(EventTimes)}
    given = _parts(text, tuple(names), "--times")
    values = {names[name]: float(value) if name in _SHARES else _seconds(value, text) for name, value in given.items()}
    return replace(times, **values)


def goodput_text(results: Sequence[Goodput], times: EventTimes) -> str:
    """Formats the goodput of jobs as a table, followed by the effect of network partitions on the largest job."""
    heads = (
        "nodes", "failures a day", "pause p50", "p95", "elastic", "checkpoint every", "restarting", "checkpoint every",
    )  # fmt: skip
    rows = [heads, *map(_cells, results)]
    notes = (
        "elastic, restarting: the share of time in which the job makes progress; in an elastic job, the other\n"
        "workers take over the work of lost workers; in a restarting job, all workers restart from a checkpoint"
    )
    return f"{aligned(rows)}\n\n{notes}\n{_partitions(results[-1].nodes, times)}"


def facts_of_goodput(result: Goodput) -> dict[str, object]:
    """Converts a result to a JSON object; each key ends with its unit."""
    return {
        "nodes": result.nodes,
        "failures_per_day": result.failures_per_day,
        "pause_p50_s": result.pause_s[0],
        "pause_p95_s": result.pause_s[1],
        "elastic_share": result.elastic,
        "elastic_checkpoint_period_s": _finite(result.elastic_period_s),
        "restarting_share": result.restarting,
        "restarting_checkpoint_period_s": _finite(result.restarting_period_s),
        "jobs_played": result.played,
        "jobs_that_lost_their_state": result.lost,
    }


def _partitions(nodes: int, times: EventTimes) -> str:
    lines = []
    for away in sorted({1, nodes // 4, nodes // 2} & set(range(1, nodes))):
        played = partition(nodes, away, times)
        outcome = (
            f"the other {nodes - away} continue after {format_seconds(played.pauses_s[0])}"
            if played.pauses_s
            else f"no machine continues: {played.end}"
        )
        lines.append(f"If {away} of {nodes} nodes {'is' if away == 1 else 'are'} cut off, {outcome}.")
    return "".join(f"{line}\n" for line in lines)


def _cells(result: Goodput) -> tuple[str, ...]:
    return (
        str(result.nodes),
        f"{result.failures_per_day:.3g}",
        format_seconds(result.pause_s[0]),
        format_seconds(result.pause_s[1]),
        f"{result.elastic:.2%}",
        _period(result.elastic_period_s),
        f"{result.restarting:.2%}",
        _period(result.restarting_period_s),
    )


def _period(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    unit = next((unit for unit in ("d", "h", "min", "s") if seconds >= _UNITS[unit]), "s")
    return f"{seconds / _UNITS[unit]:.3g} {unit}"


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _parts(text: str, names: Sequence[str], flag: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names or not value:
            raise ValueError(f"{flag} has {part!r}; it takes NAME=TIME with the names {', '.join(names)}")
        found[name] = value
    return found


def _seconds(value: str, text: str) -> float:
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} in {text!r} is not a duration: use one such as 90s, 10min, 12h or 30d")
    return float(match[1]) * _UNITS[match[2]]
