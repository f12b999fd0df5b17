"""Kills workers with SIGKILL at random instants; measures the pauses of the other workers and the lost samples."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from random import Random

from elastic_cases import jobs, timeline
from elastic_cases.churn import Churn, disturb
from elastic_cases.jobs import Job
from elastic_cases.options import Options, Rows
from elastic_cases.pauses import Figures, distribution

_RESTARTS = 1_000_000  # in effect, no limit on torchrun's restarts


class Contestant:
    """A training system whose workers are killed, one job at a time.

    Args:
        name: The label of the system's row.
        start: A function that starts a job.
        digest: The digest of an undisturbed run, if the system guarantees the same result.
        keeps_weights: True if a sample has the same weight in every step. Otherwise, the mean is over fewer workers
            after a death, so a sample that was used once cannot be distinguished from a sample that was used twice.
    """

    def __init__(
        self, name: str, start: Callable[[], Job], digest: str | None = None, keeps_weights: bool = True
    ) -> None:
        self.name, self._start, self._digest, self._keeps_weights = name, start, digest, keeps_weights
        self.figures = Figures()
        self.jobs = 0
        self._equal = self._lost = self._repeated = 0

    def run(self, churn: Churn, random: Random) -> None:
        """Runs one job and adds its results to the figures."""
        with contextlib.closing(self._start()) as job:
            kills = disturb(job, churn, random)
            self.figures.add(timeline.read(job.directory), kills, churn.workers, churn.steps)
            results = jobs.results_of(job.directory)
        self.jobs += 1
        self._equal += len(results) == churn.workers and {result["digest"] for result in results} == {self._digest}
        self._lost += max(int(str(result["lost"])) for result in results)
        self._repeated += max(int(str(result["repeated"])) for result in results)
        print(self.row(), file=sys.stderr)

    def row(self) -> dict[str, object]:
        figures = self.figures
        back = distribution(figures.back, "back")
        return {
            "system": self.name,
            "jobs": self.jobs,
            "kills": figures.deaths,
            **distribution(figures.at_death, "pause"),
            "back p50 ms": back["back p50 ms"],
            "back max ms": back["back max ms"],
            "step ms": max(figures.steps, default=None),
            "steps lost": figures.lost,
            "redone": figures.redone,
            "given up": figures.given_up,
            "others restarted": figures.restarted,
            "samples lost": self._lost,
            "repeated": self._repeated if self._keeps_weights else None,
            "digest equal": "-" if self._digest is None else f"{self._equal} of {self.jobs}",
        }


def measure(options: Options) -> tuple[str, Rows]:
    """Returns the table for Paceline alone."""
    random = Random(options.seed)
    ours = _paceline(options)
    while ours.figures.deaths < options.kills:
        ours.run(_churn(options, options.kills - ours.figures.deaths), random)
    return f"kill -9 of one of {options.workers} workers", [ours.row()]


def measure_peers(options: Options) -> tuple[str, Rows]:
    """Returns the table for Paceline and its peers. The jobs of all systems alternate."""
    contestants = [_paceline(options), _torchrun(options)]
    rows: Rows = []
    if _has_torchft(options.torchft):
        contestants.insert(1, _torchft(options, str(options.torchft)))
    else:
        rows.append({"system": f"torchft: not measured, {options.torchft} cannot import it; see --torchft"})
    randoms = {each.name: Random(options.seed) for each in contestants}
    while unfinished := [each for each in contestants if each.figures.deaths < options.few]:
        for each in unfinished:
            each.run(_churn(options, options.few - each.figures.deaths), randoms[each.name])
    return f"kill -9 of one of {options.workers} workers, and peers", [*(each.row() for each in contestants), *rows]


def _churn(options: Options, most: int) -> Churn:
    return Churn(options.workers, options.steps, most)


def _paceline(options: Options) -> Contestant:
    def start() -> Job:
        return jobs.elastic(options.workers, options.steps)

    return Contestant("paceline run --elastic", start, jobs.undisturbed_digest(options.steps))


def _torchft(options: Options, python: str) -> Contestant:
    def start() -> Job:
        return jobs.TorchFT(python, options.workers, options.steps)

    return Contestant("torchft, gloo", start, keeps_weights=False)


def _torchrun(options: Options) -> Contestant:
    def start() -> Job:
        return jobs.torchrun(options.workers, options.steps, _RESTARTS)

    return Contestant("torchrun, gloo, checkpoint every 10 steps", start)


def _has_torchft(python: str | None) -> bool:
    if python is None:
        return False
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", "import torchft"], capture_output=True).returncode == 0
    return False
