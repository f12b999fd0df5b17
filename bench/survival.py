"""Compares the simulated pause after a worker's death with the measured pause.

    python bench/survival.py [--workers 4 5 6] [--kills 30] [--steps 1500] [--json FILE]

Elastic jobs with 12 logical shards run with each number of workers. The workers are killed with SIGKILL, one at a time,
at random instants. Two of the times for `paceline plan --times` are derived from smaller jobs: `forming` (a member's
own work for a new view) from jobs of 2 workers, in which the survivor is alone, and `rendezvous` (the time until the
members are connected) from jobs of 3 workers. These times are used to simulate the other jobs, with the coordinator
that a launcher runs. All workers share the cores of this machine, so `forming` takes longer if there are more workers
than cores. "error" is the simulated median divided by the measured median, minus 1; a pause is defined as in
`bench/elastic.py`.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from random import Random

from elastic_cases import jobs, timeline
from elastic_cases.churn import Churn, disturb
from elastic_cases.pauses import Figures
from report import parser, show

SHARDS = 12
SIMULATED = 40  # deaths
_MOST_JOBS = 40  # deaths for each number of workers


def measured(workers: int, kills: int, steps: int) -> tuple[float, list[float]]:
    """Returns the duration of a step, and of each survivor's pause at each death, in seconds."""
    figures, random = Figures(), Random(workers)
    jobs_left = _MOST_JOBS
    while figures.deaths < kills:
        if jobs_left == 0:
            raise RuntimeError(f"only {figures.deaths} of {kills} workers died in {_MOST_JOBS} jobs of {steps} steps")
        jobs_left -= 1
        with contextlib.closing(jobs.elastic(workers, steps, "--shards", str(SHARDS))) as job:
            found = disturb(job, Churn(workers, steps, kills - figures.deaths), random)
            figures.add(timeline.read(job.directory), found, workers, steps)
        print(f"{workers} workers: {figures.deaths} of {kills} deaths", file=sys.stderr)
    return statistics.median(figures.steps) / 1e3, [pause / 1e3 for pause in figures.at_death]


def simulated(workers: int, times: object) -> list[float]:
    """Returns the pauses of a simulated job."""
    from paceline.operate.plan.simulated_job import MeanTimesBetweenFailures, SimulatedJob

    return (
        SimulatedJob(workers, 1, times, MeanTimesBetweenFailures(worker_s=3600.0 * workers, machine_s=0.0), 0)
        .play(SIMULATED)
        .pauses_s
    )


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument(
        "--workers", type=int, nargs="+", default=[4, 5, 6], help="numbers of workers whose pauses are predicted"
    )
    arguments.add_argument("--kills", type=int, default=30, help="number of kills for each number of workers")
    arguments.add_argument("--steps", type=int, default=1500, help="number of steps in a job")
    options = arguments.parse_args()
    from paceline import _core
    from paceline.operate.plan.simulated_job import EventTimes

    rows: list[dict[str, object]] = []
    forming_s = rendezvous_s = 0.0
    for workers in (2, 3, *options.workers):
        step_s, pauses_s = measured(workers, options.kills, options.steps)
        p50_s = statistics.median(pauses_s)
        share = max(1.0, (workers - 1) / _core.usable_cores())  # survivors per core
        times = EventTimes(step_s=step_s, forming_s=forming_s * share, rendezvous_s=rendezvous_s)
        found_s = statistics.median(simulated(workers, times))
        row: dict[str, object] = {
            "workers": workers,
            "step ms": step_s * 1e3,
            "n": len(pauses_s),
            "pause p50 ms": p50_s * 1e3,
            "pause p95 ms": statistics.quantiles(pauses_s, n=20)[-1] * 1e3,
        }
        if workers == 2:
            forming_s = max(0.0, p50_s - found_s)
            row["fitted"] = f"forming {forming_s * 1e3:.3g} ms"
        elif workers == 3:
            rendezvous_s = max(0.0, p50_s - found_s)
            row["fitted"] = f"rendezvous {rendezvous_s * 1e3:.3g} ms"
        else:
            row |= {"simulated p50 ms": found_s * 1e3, "error %": 100 * (found_s / p50_s - 1)}
        rows.append(row)
    show("Pauses of survivors of an elastic job, measured and simulated", rows, options.json)


if __name__ == "__main__":
    main()
