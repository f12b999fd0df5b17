"""Measures the time from the command to the first completed all-reduce on 2 and 4 ranks, compared with torchrun.

    python bench/startup.py [--json FILE]

The two launchers take turns starting the same kind of script. The times are measured from the start of the launcher to
the first all-reduce and to the launcher's exit. The ratio is relative to `paceline run`. The memory is that of all
ranks together after the all-reduce; a page shared by n processes counts as 1/n in each (Pss).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import compared, parser, show, spread

SCRIPT = """
import torch
import {module} as dist
dist.init_process_group({arguments})
dist.all_reduce(torch.ones(1))
import os, time
finished = time.time()
[memory] = [line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:")]
open(os.environ["BENCH_DONE"] + os.environ["RANK"], "w").write(f"{{finished}} {{memory}}")
dist.destroy_process_group()
"""
LAUNCHERS = {
    "paceline run": (["-m", "paceline", "run"], "paceline", ""),
    "torchrun": (["-m", "torch.distributed.run", "--standalone"], "torch.distributed", "'gloo'"),
}
RANKS = (2, 4)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    rows: list[dict[str, object]] = []
    for ranks in RANKS:
        rows += _rows(ranks, options.rounds)
    show("Start-up", rows, options.json)


def _rows(ranks: int, rounds: int) -> list[dict[str, object]]:
    first: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    whole: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    memory: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):
            for name, (command, module, backend) in LAUNCHERS.items():
                script = Path(directory, f"{module}.script.py")
                script.write_text(SCRIPT.format(module=module, arguments=backend))
                done = f"{directory}/done"
                words = [sys.executable, *command, "--nproc-per-node", str(ranks), str(script)]
                environment = {**os.environ, "BENCH_DONE": done, "OMP_NUM_THREADS": "1"}
                started = time.time()
                subprocess.run(words, check=True, capture_output=True, env=environment)
                whole[name].append(time.time() - started)
                answers = [Path(f"{done}{rank}").read_text().split() for rank in range(ranks)]
                first[name].append(max(float(finished) for finished, _ in answers) - started)
                memory[name].append(sum(int(kib) for _, kib in answers) / 1024)
    rows: list[dict[str, object]] = []
    for what, times in (("first all-reduce done", first), ("launcher ended", whole)):
        spreads = {name: spread(each) for name, each in times.items()}
        rows += [{"ranks": ranks, "until": what, **row} for row in compared(spreads, "paceline run", "s")]
    for row in rows[: len(LAUNCHERS)]:
        row["MiB"] = statistics.median(memory[str(row["by"])])
    return rows


if __name__ == "__main__":
    main()
