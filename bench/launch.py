"""Measures how long it takes to start an asynchronous call, and how long until the group's thread runs the call.

    python bench/launch.py [--gaps MICROSECONDS ...] [--calls 300] [--json FILE]

One rank runs its main thread on one core and the group's thread on another. In "waits", the rank has a spare core, so
the group's thread busy-waits for the next call. In "sleeps", the rank reports that it computes with two threads, so
there is no spare core and the thread sleeps. The main thread is busy for the gap between two calls, and for 100 µs
after each start. "start" is the time that `start()` takes in the main thread. "until it runs" is the time until the
other thread begins to run the call, according to the recording. The minimum, the median (p50) and the 95th percentile
over `--calls` calls are shown.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report import parser, show
from turns import rows_of_ranks

GAPS = [0, 50, 200, 1000, 5000]
AFTERWARDS_S = 100e-6
CALLS_PER_READING = 100
THREAD = "paceline-work"


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def place_threads(cores: list[int]) -> None:
    """Puts the main thread on the first core and the groups' threads on the second."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == THREAD:
            os.sched_setaffinity(int(task.name), {cores[1]})
    os.sched_setaffinity(0, {cores[0]})


def waits_of_recording() -> list[float]:
    """Returns how long each recorded asynchronous call waited for its thread, in microseconds, oldest first."""
    from paceline.comm.record.recorder import directory_of_files
    from paceline.operate.diagnosis.recording_reader import read

    (path,) = Path(directory_of_files()).glob(f"*-{os.getpid()}.record")
    calls = [call for call in read(path).calls if call.is_async]
    return [(call.started_ns - call.arrived_ns) / 1e3 for call in calls]


def measure(
    start: Callable[[], None], wait: Callable[[], None], gap_us: int, calls: int
) -> tuple[list[float], list[float]]:
    starts: list[float] = []
    waits: list[float] = []
    for _ in range(calls // CALLS_PER_READING):
        for _ in range(10 + CALLS_PER_READING):
            busy(gap_us / 1e6)
            began = time.perf_counter()
            start()
            starts.append(1e6 * (time.perf_counter() - began))
            busy(AFTERWARDS_S)
            wait()
        starts[-10 - CALLS_PER_READING :] = starts[-CALLS_PER_READING:]  # excludes the first calls after a reading
        waits += waits_of_recording()[-CALLS_PER_READING:]
    return starts, waits


def rank_main(rank: int, gaps: list[int], calls: int, directory: str) -> None:
    import torch

    import paceline as dist

    cores = sorted(os.sched_getaffinity(0))
    made = {}
    for kind, threads in (("waits", 1), ("sleeps", len(cores))):
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as rendezvous:
            dist.init_process_group("paceline", init_method=f"file://{rendezvous}/store", rank=0, world_size=1)
        torch.set_num_threads(1)
        call = dist.all_reduce_init(torch.zeros(1024))
        call.start()
        call.wait()
        place_threads(cores)
        made[kind] = {gap_us: measure(call.start, call.wait, gap_us, calls) for gap_us in gaps}
        dist.destroy_process_group()
        os.sched_setaffinity(0, set(cores))
    rows = [row_of(gap_us, kind, *made[kind][gap_us]) for gap_us in gaps for kind in made]
    Path(directory, "rows.json").write_text(json.dumps(rows))


def row_of(gap_us: int, kind: str, starts: list[float], waits: list[float]) -> dict[str, object]:
    row: dict[str, object] = {"gap µs": gap_us, "thread": kind}
    for name, values in (("start", starts), ("until it runs", waits)):
        row[f"{name} least µs"] = min(values)
        row[f"{name} p50 µs"] = statistics.median(values)
        row[f"{name} p95 µs"] = statistics.quantiles(values, n=20)[-1]
    return row | {"n": len(waits)}


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--gaps", type=int, nargs="+", default=GAPS, metavar="MICROSECONDS")
    arguments.add_argument("--calls", type=int, default=300)
    chosen = arguments.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("there is one core; the main thread and the group's thread need one each")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # a directory without recordings of other processes
        os.environ["PACELINE_RECORD_DIR"] = directory
        rows = rows_of_ranks(rank_main, 1, chosen.gaps, chosen.calls)
    show("launches of asynchronous calls", rows, chosen.json)


if __name__ == "__main__":
    main()
