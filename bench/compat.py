"""Compares unmodified torch.distributed programs under `paceline run --compat torch` with the same programs on gloo.

    python bench/compat.py [--ranks 2] [--programs NAME ...] [--turns 4] [--json FILE]

`bench/compat_cases/program.py` uses gloo and does not import Paceline. Jobs started by torchrun and by `paceline run
--compat torch` alternate; every rank has one thread. Each job also trains the model without communication, alternating
with the distributed training. n is the number of distributed steps; p50 and p95 are computed over blocks of a few
steps. "communication" is the amount by which a step exceeds the bare model's step, as a share of the step. The ratio is
a contestant's median divided by Paceline's. For "ratio to bare", each median is first divided by the bare model's
median in the same jobs, so that the effect of other load on the machine cancels out. The benchmark fails if two jobs
end with different parameters, or if gloo was not replaced.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import columns_of, keep, load, parser, show, spread

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "compat_cases" / "program.py"
PROGRAMS = {
    "DDP, transformer": ("ddp", "transformer"),
    "DDP, wide MLP": ("ddp", "wide MLP"),
    "DDP, 200 tiny layers": ("ddp", "200 tiny layers"),
    "FSDP2, transformer": ("fsdp", "transformer"),
    "all_reduce of each gradient, wide MLP": ("by hand", "wide MLP"),
}
LAUNCHERS = {
    "gloo": ("-m", "torch.distributed.run", "--standalone"),
    "--compat torch": ("-m", "paceline", "run", "--compat", "torch"),
}
OURS = "--compat torch"
TOLD = "uses Paceline's engine"
BLOCKS, STEPS = 6, 3
TOLERANCE = 1e-6  # relative difference between the sums of all parameters
LONGEST_S = 600


def job(by: str, program: str, ranks: int) -> dict[str, Any]:
    """Runs a program and returns the parsed output of its rank 0.

    Raises:
        SystemExit: The program failed, or `--compat` did not replace gloo.
    """
    way, model = PROGRAMS[program]
    words = [*LAUNCHERS[by], "--nproc-per-node", str(ranks), str(PROGRAM), way, model, str(BLOCKS), str(STEPS)]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    if done.returncode != 0 or (TOLD in done.stderr) != (by == OURS):
        raise SystemExit(f"{program} by {by} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    (told,) = (line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line)  # after the rank's prefix
    return json.loads(told)


def rows_of(program: str, jobs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, object]]:
    """Returns a row for each launcher, given the results of both launchers' jobs.

    Raises:
        SystemExit: Two jobs ended with different parameters.
    """
    ends = [each["parameters"] for of_one in jobs.values() for each in of_one]
    if not all(math.isclose(end, ends[0], rel_tol=TOLERANCE) for end in ends):
        raise SystemExit(f"{program} ends with other parameters: their sums are {ends}")
    spreads, shares, rows = {}, {}, []
    for by, of_one in jobs.items():
        steps, bare = ([s for each in of_one for s in each["times"][kind]] for kind in ("distributed", "bare"))
        spreads[by] = spread(steps, STEPS)
        share = 1 - statistics.median(bare) / spreads[by]["p50_s"]
        rows.append({"program": program, "by": by, **columns_of(spreads[by], "ms"), "communication": share})
        shares[by] = share
    return [
        {
            **row,
            "ratio": spreads[by]["p50_s"] / spreads[OURS]["p50_s"],
            "ratio to bare": (1 - shares[OURS]) / (1 - shares[by]),
        }
        for by, row in zip(jobs, rows, strict=True)
    ]


def measured(program: str, ranks: int, turns: int) -> list[dict[str, object]]:
    """Runs a program alternately with both launchers, and returns a row for each launcher."""
    jobs: dict[str, list[dict[str, Any]]] = {by: [] for by in LAUNCHERS}
    for turn in range(turns):
        for by in reversed(LAUNCHERS) if turn % 2 else LAUNCHERS:
            jobs[by].append(job(by, program, ranks))
    return rows_of(program, jobs)


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS, metavar="NAME")
    arguments.add_argument("--turns", type=int, default=4, help="number of jobs with each launcher")
    return arguments.parse_args(words)


def main() -> None:
    options = options_of()
    at_first = load()
    rows = [row for program in options.programs for row in measured(program, options.ranks, options.turns)]
    title = f"Programs of torch.distributed on {options.ranks} ranks of one thread, without an edit"
    show(title, rows, None)
    if options.json:
        note = f"The load average was {at_first} at the beginning and {load()} at the end."
        keep([{"title": title, "rows": rows}], options.json, note)


if __name__ == "__main__":
    main()
