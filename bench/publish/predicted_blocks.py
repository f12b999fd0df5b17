"""Defines the blocks of docs/plan.md and docs/uneven-networks.md: predictions, and choices based on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from publish.results import Result, Row
from publish.tables import Cell, duration, pivot, source, spread, table

Results = Mapping[str, Result]

_CASES = {
    "slow-host": "one host has a slow link",
    "slow-pair": "the link between two hosts is slow",
    "two-racks": "two racks share thin uplinks",
}


def plan(results: Results) -> str:
    result = results["plan"]

    def share(name: str) -> Cell:
        return lambda row: f"{row[name]:.1%}"

    columns: dict[str, Cell] = {
        "predicted": "of",
        "points": "points",
        "error, p50": share("error p50"),
        "p95": share("error p95"),
        "largest": share("error max"),
        "spread of repeats, p50": share("spread p50"),
        "spread, p95": share("spread p95"),
        "error beyond the spread, p95": share("beyond spread p95"),
    }
    return "\n\n".join([table(result.rows("errors"), columns), source(result)])


def held_out(results: Results) -> str:
    """Returns the block for a result of `bench/plan.py` at points that were not used to determine call errors."""
    result = results["plan-held-out"]
    columns: dict[str, Cell] = {
        "predicted": "of",
        "points": "points",
        "within the band": lambda row: f"{row['held']:.0%}",
        "width of the band, p50": lambda row: f"{row['band width p50']:.0%}",
        "error, p50": lambda row: f"{row['error p50']:.1%}",
        "p95": lambda row: f"{row['error p95']:.1%}",
        "spread of repeats, p95": lambda row: f"{row['spread p95']:.1%}",
    }
    return "\n\n".join([table(result.rows("errors"), columns), source(result)])


def survival(results: Results) -> str:
    """Returns the block for a result of `bench/survival.py`."""
    result = results["survival"]
    columns: dict[str, Cell] = {
        "workers": "workers",
        "step": lambda row: duration(row["step ms"]),
        "n": "n",
        "measured pause, p50": lambda row: duration(row["pause p50 ms"]),
        "p95": lambda row: duration(row["pause p95 ms"]),
        "simulated, p50": lambda row: (
            f"fitted: {row['fitted']}" if "fitted" in row else duration(row["simulated p50 ms"])
        ),
        "error": lambda row: None if "fitted" in row else f"{row['error %'] / 100:+.0%}",
    }
    return "\n\n".join([table(result.rows(), columns), source(result)])


def uneven(name: str) -> Callable[[Results], str]:
    """Returns the block for a result of `bench/uneven.py`."""

    def case(row: Row) -> str:
        return f"{_CASES[row['case']]}, {row['size']}"

    def block(results: Results) -> str:
        result = results[name]
        fixed = dict.fromkeys(row["by"] for row in result.rows() if row["by"] != "paceline")
        columns: dict[str, Callable[[Mapping[str, Row]], object]] = {
            "Paceline's choice": lambda by: f"`{by['paceline']['chosen']}`",
            "ms": spread("paceline", "ms"),
            "fraction of the optimum": _share("paceline"),
        }
        columns |= {f"`{each}`": _share(each) for each in fixed}
        return "\n\n".join([pivot(result.rows(), {"case": case}, columns), source(result)])

    return block


def _share(by: str) -> Callable[[Mapping[str, Row]], object]:
    return lambda contestants: contestants[by]["of optimum"]


PREDICTED = {
    "plan": plan,
    "plan-held-out": held_out,
    "survival": survival,
    "uneven": uneven("uneven"),
    "uneven-measured": uneven("uneven-measured"),
}
