"""How much of its time a job gets on with its work, if workers and machines fail.

An elastic job is played in virtual time with the coordinator that a launcher runs (`job.py`). A job that restarts is
computed with Daly's closed form (A higher order estimate of the optimum checkpoint interval for restart dumps, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.plan.survival.job import Job, Played
from paceline.plan.survival.timings import Failures, Timings

_NEVER_S = 1e12
_MOST_MACHINES, _MOST_PER_MACHINE = 16, 2
"""The most machines, and workers of each, that are played. Of more, one stands for several and fails as often."""


@dataclass(frozen=True)
class Goodput:
    """What becomes of a job's time.

    Attributes:
        nodes: machines.
        failures_per_day: of workers and machines; those of everything at once are not among them.
        pause_s: what a failure costs an elastic job: the median and the 95th percentile.
        elastic: the share of its time in which an elastic job makes steps as if nothing failed, checkpoints included.
        elastic_period_s: between its checkpoints, the best; infinite if it needs none.
        restarting: the same share of a job that begins again from its newest checkpoint after each failure.
        restarting_period_s: between its checkpoints, the best.
        lost: of the jobs that were played, how many lost their state because all who had it had died.
        played: how many jobs were played.
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
    nodes: int, per_node: int, times: Timings, failures: Failures, *, jobs: int = 8, failures_of_job: int = 25
) -> Goodput:
    """Returns what becomes of the time of a job on so many nodes, from `jobs` jobs that are played.

    Raises:
        ValueError: a time is impossible; the message names it.
    """
    if (problem := times.problem()) is not None:
        raise ValueError(problem)
    rate = failures.rate(nodes, per_node)
    played = [play(nodes, per_node, times, failures, seed, failures_of_job) for seed in range(jobs)] if rate else []
    seconds = sum(each.seconds for each in played)
    progress = sum(each.steps for each in played) * times.step_s / seconds if seconds else 1.0
    outage = 1 / failures.job_s if failures.job_s else 0.0
    if seconds:
        outage += sum(each.is_lost for each in played) / seconds
    elastic_period_s = best_period_s(times.saving_s, 1 / outage if outage else 0.0)
    restarting_period_s = best_period_s(times.saving_s, 1 / (rate + outage) if rate + outage else 0.0)
    return Goodput(
        nodes,
        rate * 86_400,
        _spread([pause_s for each in played for pause_s in each.pauses_s]),
        min(1.0, progress) * share_with_restarts(elastic_period_s, times.saving_s, times.restarting_s, outage),
        elastic_period_s,
        share_with_restarts(restarting_period_s, times.saving_s, times.restarting_s, rate + outage),
        restarting_period_s,
        sum(each.is_lost for each in played),
        len(played),
    )


def play(nodes: int, per_node: int, times: Timings, failures: Failures, seed: int, most: int) -> Played:
    """Plays a job until so many failures are over."""
    machines, per_machine = min(nodes, _MOST_MACHINES), min(per_node, _MOST_PER_MACHINE)
    fold, workers = nodes / machines, nodes * per_node
    scaled = Failures(failures.worker_s * machines * per_machine / workers, failures.machine_s / fold)
    return Job(machines, per_machine, times, scaled, seed, share=1 / workers).play(most)


def partition(nodes: int, away: int, times: Timings) -> Played:
    """Plays what happens when the network cuts off `away` of the nodes; the coordinator is on the other side.

    Returns:
        The job, with the pause of the side that goes on; without one it does not, and `end` says why.
    """
    machines = min(nodes, _MOST_MACHINES)
    cut = round(away * machines / nodes)
    cut = min(max(cut, 1), machines - 1)
    return Job(machines, 1, replace(times, repair_s=_NEVER_S), Failures(machine_s=0.0), 0).part(cut)


def best_period_s(saving_s: float, between_s: float) -> float:
    """Returns the seconds of work between two checkpoints that lose the least time (Young 1974, Daly 2006).

    Args:
        saving_s: by how much a checkpoint delays the training.
        between_s: the mean time between failures after which the newest checkpoint is needed; 0 for never.
    """
    if not between_s:
        return math.inf
    if saving_s >= 2 * between_s:
        return between_s
    ratio = saving_s / (2 * between_s)
    return max(math.sqrt(2 * saving_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - saving_s, 1e-9)


def share_with_restarts(period_s: float, saving_s: float, restarting_s: float, rate: float) -> float:
    """Returns the share of its time in which a job that restarts gets on, with exponential failures (Daly 2006).

    Args:
        period_s: the work between two checkpoints; infinite without checkpoints.
        saving_s: by how much a checkpoint delays the training.
        restarting_s: until the job computes again after a failure, which may fail too.
        rate: failures a second.
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
