"""Measures each point of a grid several times, and predicts it from separate measurements of links and steps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from hosts.fixture import Hosts
from report import p95
from world import RankFailed

from paceline.comm.schedule.network import NetworkLink
from paceline.comm.schedule.simulation import simulate_call
from paceline.comm.schedule.steps import Operation
from paceline.operate.plan.calibration import Calibration, Links, decode, network_of
from paceline.operate.plan.prediction import call_factors, predict
from paceline.operate.plan.step_time import measured
from plan_cases import programs

Row = dict[str, object]

_TIMEOUT_S = 300


@dataclass(frozen=True)
class Grid:
    """The dimensions of the grid."""

    hosts: tuple[int, ...]
    per_host: tuple[int, ...]
    rates: tuple[str, ...]
    delays_ms: tuple[float, ...]
    algorithms: tuple[str, ...]
    models: tuple[str, ...]
    sizes: tuple[int, ...]
    steps: int
    repeats: int

    def networks(self) -> Iterator[tuple[str, float]]:
        """Yields each combination of rate and delay."""
        return itertools.product(self.rates, self.delays_ms)

    def worlds(self) -> Iterator[tuple[int, int]]:
        """Yields each combination of a number of hosts and a number of ranks per host."""
        return itertools.product(self.hosts, self.per_host)


@dataclass(frozen=True)
class Known:
    """The calibration: a link for each rate and delay, the link within a host, and a step for each number of ranks."""

    links: dict[tuple[str, float], NetworkLink]
    within_host: NetworkLink
    reduction_s_per_byte: float
    steps: dict[int, dict[str, Calibration]]

    def links_at(self, rate: str, delay_ms: float) -> Links:
        """Returns the links of a network."""
        return Links(self.within_host, self.links[rate, delay_ms], None, self.reduction_s_per_byte)


def calibrate(grid: Grid) -> Known:
    """Measures the links with two ranks, and the steps without communication on as many ranks as each point has."""
    links = {}
    for rate, delay_ms in grid.networks():
        (link, _), *_ = Hosts(2, 1, rate=rate, delay_ms=delay_ms)(programs.measure_two, timeout_s=_TIMEOUT_S)
        links[rate, delay_ms] = link
    (within, gamma), *_ = Hosts(1, 2)(programs.measure_two, timeout_s=_TIMEOUT_S)
    steps = {}
    for ranks in sorted({hosts * per_host for hosts, per_host in grid.worlds()}):
        answers = Hosts(1, ranks)(programs.calibrate, grid.models, grid.steps, timeout_s=_TIMEOUT_S)
        steps[ranks] = {name: decode(content) for name, content in answers[0].items()}
    return Known(links, within, gamma, steps)


def points(grid: Grid, known: Known, failed: list[str]) -> Iterator[Row]:
    """Yields the measured and predicted times of each call and step at each point.

    Args:
        grid: The points.
        known: The calibration.
        failed: The list to which a line is added for each failed run. The point then has one repeat fewer; a point
            without repeats is skipped.
    """
    for (rate, delay_ms), (hosts, per_host) in itertools.product(grid.networks(), grid.worlds()):
        world = Hosts(hosts, per_host, rate=rate, delay_ms=delay_ms)
        for algorithm in grid.algorithms:
            where: Row = {"hosts": f"{hosts}x{per_host}", "rate": rate, "delay ms": delay_ms, "algorithm": algorithm}
            print(" ".join(map(str, where.values())), file=sys.stderr, flush=True)
            runs = []
            for _ in range(grid.repeats):
                try:
                    answers = world(
                        programs.measure, algorithm, grid.sizes, grid.models, grid.steps, timeout_s=_TIMEOUT_S
                    )
                except RankFailed as error:
                    failed.append(f"{where}: {error}")
                    print(failed[-1], file=sys.stderr, flush=True)
                else:
                    runs.append(answers[0])
            if not runs:
                continue
            predicted = _predicted(grid, known, hosts, per_host, known.links_at(rate, delay_ms), algorithm)
            for what, band in predicted.items():
                times = [run[what] for run in runs]
                yield {**where, "what": what, **compared(band, times)}


@dataclass(frozen=True)
class Band:
    """A prediction and the band from the 5th to the 95th percentile around it, in seconds."""

    predicted_s: float
    low_s: float
    high_s: float


def _predicted(grid: Grid, known: Known, hosts: int, per_host: int, links: Links, algorithm: str) -> dict[str, Band]:
    network = network_of(links, hosts, per_host)
    steps = known.steps[hosts * per_host]
    low, high = call_factors(next(iter(steps.values())).origin) if steps else (1.0, 1.0)
    found = {}
    for nbytes in grid.sizes:
        seconds = simulate_call(algorithm, Operation.ALL_REDUCE, nbytes, network).seconds
        found[f"all_reduce {nbytes / programs.MIB:.3g} MiB"] = Band(seconds, low * seconds, high * seconds)
    for name, calibration in steps.items():
        strategy = replace(measured(calibration), algorithm=algorithm)
        job = predict(replace(calibration, links=links), network, strategy, simulate_call)
        found[f"step, {name}"] = Band(job.step.seconds, job.low_s, job.high_s)
    return found


def compared(band: Band, times_s: Sequence[float]) -> Row:
    """Returns a row: the error and the spread as fractions of the mean, and whether the band contains the mean."""
    mean, predicted_s = fmean(times_s), band.predicted_s
    return {
        "n": len(times_s),
        "measured ms": 1e3 * mean,
        "predicted ms": 1e3 * predicted_s,
        "low ms": 1e3 * band.low_s,
        "high ms": 1e3 * band.high_s,
        "held": int(band.low_s <= mean <= band.high_s),
        "error": abs(predicted_s - mean) / mean,
        "sign": "over" if predicted_s > mean else "under",
        "spread": (max(times_s) - min(times_s)) / mean,
    }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Returns percentiles of the errors of all all-reduces, of all steps, and of each algorithm."""
    kinds = {"all-reduces": "all_reduce", "steps": "step"}
    groups = {name: [row for row in rows if str(row["what"]).startswith(start)] for name, start in kinds.items()}
    for algorithm in dict.fromkeys(str(row["algorithm"]) for row in rows):
        groups[f"all with {algorithm}"] = [row for row in rows if row["algorithm"] == algorithm]
    groups["all"] = list(rows)
    return [{"of": name, **_percentiles(each)} for name, each in groups.items() if each]


def _percentiles(rows: Sequence[Row]) -> Row:
    errors, spreads = ([float(str(row[name])) for row in rows] for name in ("error", "spread"))
    beyond = [max(0.0, error - spread) for error, spread in zip(errors, spreads, strict=True)]
    return {
        "points": len(rows),
        "error p50": median(errors),
        "error p95": p95(errors),
        "error max": max(errors),
        "spread p50": median(spreads),
        "spread p95": p95(spreads),
        "beyond spread p95": p95(beyond),
        "held": sum(int(str(row["held"])) for row in rows) / len(rows),
        "band width p50": median(
            (float(str(r["high ms"])) - float(str(r["low ms"]))) / float(str(r["measured ms"])) for r in rows
        ),
    }
