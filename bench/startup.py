"""How long is it from the command to the first finished all-reduce on 2 ranks, against torchrun?

    python bench/startup.py [--json FILE]

Both launchers start the same kind of script, in turns; the time is from starting the launcher to the first all-reduce,
and to the launcher's end. The ratio is to `paceline run`.
"""

from __future__ import annotations

import os
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
open(os.environ["BENCH_DONE"] + os.environ["RANK"], "w").write(str(time.time()))
dist.destroy_process_group()
"""
LAUNCHERS = {
    "paceline run": (["-m", "paceline", "run", "--nproc-per-node", "2"], "paceline", ""),
    "torchrun": (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "torch.distributed",
        "'gloo'",
    ),
}


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    first: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    whole: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(options.rounds):
            for name, (command, module, backend) in LAUNCHERS.items():
                script = Path(directory, f"{module}.script.py")
                script.write_text(SCRIPT.format(module=module, arguments=backend))
                done = f"{directory}/done"
                started = time.time()
                environment = {**os.environ, "BENCH_DONE": done, "OMP_NUM_THREADS": "1"}
                subprocess.run(
                    [sys.executable, *command, str(script)], check=True, capture_output=True, env=environment
                )
                whole[name].append(time.time() - started)
                first[name].append(max(float(Path(done + rank).read_text()) for rank in "01") - started)
    rows: list[dict[str, object]] = []
    for what, times in (("first all-reduce done", first), ("launcher ended", whole)):
        spreads = {name: spread(each) for name, each in times.items()}
        rows += [{"until": what, **row} for row in compared(spreads, "paceline run", "s")]
    show("Start-up of 2 ranks", rows, options.json)


if __name__ == "__main__":
    main()
