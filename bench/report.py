"""Measures and summarizes times, prints tables and writes the file given by `--json`, for all benchmarks."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypedDict

Rows = Sequence[dict[str, object]]

_NAMED = ("paceline", "torch", "numpy", "mpi4py")  # the packages whose versions a result lists


class Spread(TypedDict):
    """The distribution of a contestant's times.

    Attributes:
        n: The number of timed calls or steps.
        p50_s: The median over turns of the seconds per call.
        p95_s: The 95th percentile over turns.
    """

    n: int
    p50_s: float
    p95_s: float


def parser(description: str) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    return arguments


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )


def versions() -> dict[str, str]:
    """Returns the versions of the relevant packages that are installed."""
    found = {}
    for name in _NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """Returns the command line without the options `--json` and `--log`."""
    words = [f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    for option in ("--json", "--log"):
        if option in words:
            at = words.index(option)
            words[at : at + 2] = []
    return shlex.join(["python", *words])


def load() -> str:
    """Returns the load average: the mean number of running or ready processes over the last minute."""
    return f"{os.getloadavg()[0]:.0f}"


def show(title: str, rows: Rows, json_path: str | None) -> None:
    """Prints a table, and writes it to `json_path` if given."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_format(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(columns)]
    print(f"{title}\n{machine()}\n")
    for line in (columns, ["-" * width for width in widths], *cells):
        print("| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |")
    print()
    if json_path:
        keep([{"title": title, "rows": rows}], json_path)


def keep(tables: Sequence[dict[str, object]], json_path: str, note: str = "") -> None:
    """Writes tables and the data needed to interpret them; `bench/publish` generates documentation from such files."""
    result = {
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "note": note,
        "tables": list(tables),
    }
    Path(json_path).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _format(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def seconds_per_call(call: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def spread(times_s: Sequence[float], of_a_turn: int = 1) -> Spread:
    """Summarizes the seconds per call of each turn, where each turn had `of_a_turn` calls."""
    return {"n": len(times_s) * of_a_turn, "p50_s": statistics.median(times_s), "p95_s": p95(times_s)}


def p95(values: Sequence[float]) -> float:
    """Returns the 95th percentile. With few values, it is close to the largest value, but never exceeds it."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def p5(values: Sequence[float]) -> float:
    """Returns the 5th percentile. It is used for rates, because their lowest values are the worst."""
    return -p95([-value for value in values])


def columns_of(of: Spread, unit: str = "µs") -> dict[str, object]:
    """Returns n, the median and the 95th percentile, as columns of a table."""
    per_s = {"µs": 1e6, "ms": 1e3, "s": 1.0}[unit]
    return {"n": of["n"], f"p50 {unit}": per_s * of["p50_s"], f"p95 {unit}": per_s * of["p95_s"]}


def compared(spreads: dict[str, Spread], ours: str, unit: str = "µs") -> list[dict[str, object]]:
    """Returns a row for each contestant; the ratio is the contestant's median divided by that of `ours`."""
    return [
        {"by": name, **columns_of(each, unit), "ratio": each["p50_s"] / spreads[ours]["p50_s"]}
        for name, each in spreads.items()
    ]


def in_turns(
    contestants: dict[str, Callable[[], object]],
    calls: dict[str, int],
    rounds: int,
    meet: Callable[[], object] = lambda: None,
    settles: bool = False,
) -> dict[str, list[float]]:
    """Returns the seconds per call in each turn. Turns alternate, so changes in load affect all contestants equally.

    `meet` is called before each turn and is not timed. If it is a barrier of all ranks, pending work from one turn does
    not slow down the next turn. With `settles`, each turn begins with as many untimed calls as timed calls, because
    ranks may share a core for a few milliseconds after the turn of a contestant whose threads sleep.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            meet()
            if settles:
                seconds_per_call(call, calls[name])
            times[name].append(seconds_per_call(call, calls[name]))
    return times


def interleaved(
    contestants: dict[str, Callable[[], object]],
    calls: dict[str, int],
    rounds: int,
    meet: Callable[[], object] = lambda: None,
) -> dict[str, Spread]:
    """Measures contestants in turns, as `in_turns` does, and summarizes the times."""
    return {name: spread(times, calls[name]) for name, times in in_turns(contestants, calls, rounds, meet).items()}


def human(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
