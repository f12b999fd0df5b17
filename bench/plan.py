"""Measures the accuracy of the predictions of `paceline plan`.

    python bench/plan.py [--hosts 2 3 4] [--per-host 1 2] [--rates 100mbit 300mbit] [--delays 0 5] [--json FILE]

Hosts are network namespaces of this machine (as root), joined by links of the given rates and delays. Calibration
measures the link for each rate and delay, with one message at a time between two hosts; the link within a host; and the
steps of each model without communication. Because the ranks share the cores of this machine, the steps are measured
while as many ranks train as at the grid point. All-reduces and steps with communication are never used for calibration.

The error is the difference between the prediction and the mean of the repeats, relative to the mean. The spread is the
difference between the slowest and the fastest repeat; each repeat is a separate run. "beyond spread" is the amount by
which the error exceeds the spread. "held" is the share of the points whose mean is within the printed band from the 5th
to the 95th percentile. The width of the band is relative to the mean. The default grid takes about two hours. If a run
fails, its error is printed and the other runs continue. Sizes below 1 MiB are excluded, because the token buckets that
limit the rates let 128 KiB pass at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from plan_cases.grid import Grid, calibrate, points, summary
from plan_cases.programs import MIB, MODELS
from report import keep, parser, show


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    arguments.add_argument("--per-host", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--rates", nargs="+", default=["100mbit", "300mbit"])
    arguments.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0], help="one-way delays, in ms")
    arguments.add_argument("--algorithms", nargs="+", default=["ring", "halving_doubling", "hierarchical"])
    arguments.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    arguments.add_argument("--sizes", type=float, nargs="*", default=[1, 4], help="all-reduce sizes, in MiB")
    arguments.add_argument("--steps", type=int, default=10, help="number of training steps")
    arguments.add_argument("--repeats", type=int, default=3, help="number of runs for each point")
    options = arguments.parse_args()
    grid = Grid(
        hosts=tuple(options.hosts),
        per_host=tuple(options.per_host),
        rates=tuple(options.rates),
        delays_ms=tuple(options.delays),
        algorithms=tuple(options.algorithms),
        models=tuple(options.models),
        sizes=tuple(int(size * MIB) for size in options.sizes),
        steps=options.steps,
        repeats=options.repeats,
    )
    failed: list[str] = []
    rows = list(points(grid, calibrate(grid), failed))
    load = f"load {os.getloadavg()[1]:.1f} (5 minutes) at the end"
    errors, all_points = f"Errors of predictions, {load}", "The points"
    show(all_points, rows, None)
    show(errors, summary(rows), None)
    if options.json:
        tables = [
            {"title": errors, "case": "errors", "rows": summary(rows)},
            {"title": all_points, "case": "points", "rows": rows},
        ]
        keep(tables, options.json, note=f"{len(failed)} runs failed and are left out." if failed else "")


if __name__ == "__main__":
    main()
