"""What the benchmarks share: a table, `--json`, and the machine they ran on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path


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


def show(title: str, rows: Sequence[dict[str, object]], json_path: str | None) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_format(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(columns)]
    print(f"{title}\n{machine()}\n")
    for line in (columns, ["-" * width for width in widths], *cells):
        print("| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |")
    print()
    if json_path:
        Path(json_path).write_text(json.dumps({"title": title, "machine": machine(), "rows": rows}, indent=1) + "\n")


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


def interleaved(contestants: dict[str, Callable[[], object]], calls: dict[str, int], rounds: int) -> dict[str, float]:
    """Median seconds a call of each, measured in turns so that the machine's moods fall on all alike."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            times[name].append(seconds_per_call(call, calls[name]))
    return {name: statistics.median(measured) for name, measured in times.items()}


def human(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
