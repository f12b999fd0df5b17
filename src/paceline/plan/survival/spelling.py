"""What failures cost, in words and figures; and the times that people give."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from paceline.plan.spelling import aligned
from paceline.plan.survival.goodput import Goodput, partition
from paceline.plan.survival.timings import Failures, Timings
from paceline.schedule.cost import spell_seconds

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|h|d)")
_SHARES = ("slowness", "replaying")  # of the times, those that are numbers without a unit


def parse_failures(text: str) -> Failures:
    """Returns mean times between failures, as in `machine=30d,worker=90d,job=60d`; what is not named never fails.

    Raises:
        ValueError: a part has another form or name.
    """
    given = _parts(text, ("worker", "machine", "job"), "--failures")
    return Failures(*(_seconds(given[name], text) if name in given else 0.0 for name in ("worker", "machine", "job")))


def parse_times(text: str, times: Timings) -> Timings:
    """Returns the times with those in place that are given, as in `repair=10min,saving=2s,slowness=1.2`.

    Raises:
        ValueError: a part has another form or name.
    """
    names = {each.name.removesuffix("_s"): each.name for each in fields(Timings)}
    given = _parts(text, tuple(names), "--times")
    values = {names[name]: float(value) if name in _SHARES else _seconds(value, text) for name, value in given.items()}
    return replace(times, **values)


def goodput_text(results: Sequence[Goodput], times: Timings) -> str:
    """Returns a table of what becomes of the time of jobs, and what a partition of the largest does."""
    heads = (
        "nodes", "failures a day", "pause p50", "p95", "elastic", "checkpoint every", "restarting", "checkpoint every",
    )  # fmt: skip
    rows = [heads, *(_cells(each) for each in results)]
    notes = (
        "elastic, restarting: the share of its time in which a job makes steps as if nothing failed; in an elastic\n"
        "job the others take the work of lost workers, and in one that restarts all begin again from a checkpoint"
    )
    return f"{aligned(rows)}\n\n{notes}\n{_partitions(results[-1].nodes, times)}"


def facts_of_goodput(result: Goodput) -> dict[str, object]:
    """Returns a result as JSON shows it; each name ends with its unit."""
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


def _partitions(nodes: int, times: Timings) -> str:
    lines = []
    for away in sorted({1, nodes // 4, nodes // 2} & set(range(1, nodes))):
        played = partition(nodes, away, times)
        outcome = (
            f"the other {nodes - away} go on after {spell_seconds(played.pauses_s[0])}"
            if played.pauses_s
            else f"nobody goes on: {played.end}"
        )
        lines.append(f"If {away} of {nodes} nodes {'is' if away == 1 else 'are'} cut off, {outcome}.")
    return "".join(f"{line}\n" for line in lines)


def _cells(result: Goodput) -> tuple[str, ...]:
    return (
        str(result.nodes),
        f"{result.failures_per_day:.3g}",
        spell_seconds(result.pause_s[0]),
        spell_seconds(result.pause_s[1]),
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
        raise ValueError(f"{value!r} in {text!r} is no time: give one like 90s, 10min, 12h or 30d")
    return float(match[1]) * _UNITS[match[2]]
