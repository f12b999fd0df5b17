"""What the benchmarks share: how times are measured and summed up, a table, and what `--json` writes."""

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

_NAMED = ("paceline", "torch", "numpy", "mpi4py")  # the packages whose versions a result names


class Spread(TypedDict):
    """How a contestant's times were distributed.

    Attributes:
        n: the calls or steps that were timed.
        p50_s: the median over its turns of the seconds of one.
        p95_s: the 95th percentile.
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
    """Returns the versions of the packages that matter, of those that are installed."""
    found = {}
    for name in _NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """Returns what was called, without where the rows and the log go."""
    words = [f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    for option in ("--json", "--log"):
        if option in words:
            at = words.index(option)
            words[at : at + 2] = []
    return shlex.join(["python", *words])


def load() -> str:
    """Returns the number of processes that ran or wanted to, over the last minute."""
    return f"{os.getloadavg()[0]:.0f}"


def show(title: str, rows: Rows, json_path: str | None) -> None:
    """Prints a table, and writes it to `json_path` if there is one."""
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
    """Writes tables with all that one must know to judge them; `bench/publish` draws documentation from such files."""
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
    """Sums up the seconds of a call in each turn, if each turn made `of_a_turn` calls."""
    return {"n": len(times_s) * of_a_turn, "p50_s": statistics.median(times_s), "p95_s": p95(times_s)}


def p95(values: Sequence[float]) -> float:
    """Returns the 95th percentile; of few values it lies next to the largest one, and never beyond it."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def p5(values: Sequence[float]) -> float:
    """Returns the 5th percentile, for rates, of which the least are the worst."""
    return -p95([-value for value in values])


def columns_of(of: Spread, unit: str = "µs") -> dict[str, object]:
    """Returns n, the median and the 95th percentile, as columns of a table."""
    per_s = {"µs": 1e6, "ms": 1e3, "s": 1.0}[unit]
    return {"n": of["n"], f"p50 {unit}": per_s * of["p50_s"], f"p95 {unit}": per_s * of["p95_s"]}


def compared(spreads: dict[str, Spread], ours: str, unit: str = "µs") -> list[dict[str, object]]:
    """Returns a row for each contestant; the ratio is its median divided by that of `ours`."""
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
    """Returns the seconds of a call in each turn; all take turns, so that the machine's moods fall on all alike.

    Before each turn, outside of its time, `meet` is called: with a barrier of all ranks, no turn pays for what is still
    under way of the one before. With `settles`, as many calls as are timed are made before those: after a contestant
    whose threads sleep in its calls, ranks may find themselves on the same core for some milliseconds.
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
    """Sums up `in_turns`."""
    return {name: spread(times, calls[name]) for name, times in in_turns(contestants, calls, rounds, meet).items()}


def human(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
