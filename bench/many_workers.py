"""Measures the time until N workers that do not import torch have started and are all connected.

    python bench/many_workers.py [--workers 256] [--rounds 3] [--json FILE]

The workers connect through the launcher's store, as the ranks of a group do; the time is measured from the start of the
launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import columns_of, parser, show, spread

SCRIPT = """
import os, sys, time
from paceline.comm.rendezvous.rendezvous import rendezvous
joined = rendezvous(None, None, -1, -1, 60)
if joined.rank == 0:
    open(sys.argv[1], "w").write(str(time.time()))
"""


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--workers", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        script, done = Path(directory, "script.py"), Path(directory, "done")
        script.write_text(SCRIPT)
        for method in ("auto", "spawn"):
            met: list[float] = []
            ended: list[float] = []
            flags = ["--start-method", method, "--nproc-per-node", str(options.workers)]
            for _ in range(options.rounds):
                started = time.time()
                command = [sys.executable, "-m", "paceline", "run", *flags, str(script), str(done)]
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                ended.append(time.time() - started)
                met.append(float(done.read_text()) - started)
            row = {"start method": method, "workers": options.workers, "cores": len(os.sched_getaffinity(0))}
            for what, times in (("all have met", met), ("launcher ended", ended)):
                rows.append({**row, "until": what, **columns_of(spread(times), "s")})
    show("Start-up of many workers", rows, options.json)


if __name__ == "__main__":
    main()
