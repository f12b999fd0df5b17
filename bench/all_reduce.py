"""Measures the duration of a float32 all-reduce with Paceline, torch's gloo and Open MPI.

    python bench/all_reduce.py [--ranks 2 4] [--json FILE]

Every rank has one thread. Paceline and gloo run alternately in the same processes; the first half of the calls is a
warm-up and is not timed. If Open MPI was installed by `make`, it runs three times in separate processes, between runs
of Paceline and gloo. p50 and p95 are computed over the turns, n is the number of calls, and the ratio is a contestant's
median divided by Paceline's.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mpi_libraries import open_mpi
from report import Rows, compared, human, in_turns, parser, seconds_per_call, show, spread

SIZES = [4, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20, 128 << 20]
ROUNDS = 20
WARM_UP = 3


def calls_for(nbytes: int, slow: bool) -> int:
    """Returns the number of calls that the slower contestant completes in about 10 ms."""
    budget = 50 if slow else 500
    return max(1, min(budget, (64 << 20) // max(nbytes, 1 << 16)))


def rank_main(rank: int, ranks: int, sizes: list[int], directory: str) -> None:
    import torch
    import torch.distributed as gloo

    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    gloo.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=ranks)
    results = {}
    for nbytes in sizes:
        plain = torch.zeros(nbytes // 4)
        shared = dist.empty_shared(nbytes // 4).zero_()
        contestants = {
            "paceline": lambda tensor=plain: dist.all_reduce(tensor),
            "empty_shared": lambda tensor=shared: dist.all_reduce(tensor),
            "gloo": lambda tensor=plain: gloo.all_reduce(tensor),
        }
        calls = {"paceline": calls_for(nbytes, False), "empty_shared": calls_for(nbytes, False)}
        calls["gloo"] = calls_for(nbytes, True) if ranks == 2 else max(1, calls_for(nbytes, True) // 8)
        results[nbytes] = in_turns(contestants, calls, ROUNDS, dist.barrier, settles=True), calls
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(results))
    dist.barrier()
    gloo.destroy_process_group()


def mpi_main(sizes: list[int], result: str) -> None:
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    results = {"library": MPI.Get_library_version().split(",")[0].strip()}
    for nbytes in sizes:
        tensor = numpy.zeros(nbytes // 4, numpy.float32)

        def call(tensor: numpy.ndarray = tensor) -> None:
            world.Allreduce(MPI.IN_PLACE, tensor)

        for _ in range(WARM_UP):
            call()
        calls = calls_for(nbytes, False)
        results[str(nbytes)] = [seconds_per_call(call, calls) for _ in range(ROUNDS)], calls
    if world.rank == 0:
        Path(result).write_text(json.dumps(results))


def run_mpi(ranks: int, sizes: list[int], directory: str) -> dict[str, Any] | None:
    """Returns the measurements of Open MPI's ranks, or None if Open MPI is not installed."""
    library = open_mpi()
    if library is None:
        return None
    result = f"{directory}/mpi.json"
    library.run(ranks, __file__, "--mpi-worker", result, "--sizes", *map(str, sizes))
    return json.loads(Path(result).read_text())


def rows_of(ranks: int, nbytes: int, runs: list[tuple[dict[str, list[float]], dict[str, int]]]) -> Rows:
    """Returns the table rows for one size, given the measurements of all runs."""
    calls = runs[0][1]
    pooled = {name: [time_s for times, _ in runs for time_s in times.get(name, [])] for name in calls}
    spreads = {name: spread(times_s, calls[name]) for name, times_s in pooled.items()}
    return [{"ranks": ranks, "size": human(nbytes), **row} for row in compared(spreads, "paceline")]


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--mpi-worker", metavar="FILE", help="used by this script itself")
    options = arguments.parse_args()
    if options.mpi_worker:
        mpi_main(options.sizes, options.mpi_worker)
        return
    import paceline as dist

    rows: list[dict[str, object]] = []
    for ranks in options.ranks:
        runs: list[dict[str, Any]] = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as directory:
                dist.spawn(rank_main, (ranks, options.sizes, directory), ranks)
                runs.append(json.loads(Path(directory, "result.json").read_text()))
                mpi = run_mpi(ranks, options.sizes, directory)
            for nbytes in options.sizes if mpi is not None else ():
                times_s, calls = mpi[str(nbytes)]
                runs[-1][str(nbytes)][0][mpi["library"]] = times_s
                runs[-1][str(nbytes)][1][mpi["library"]] = calls
        for nbytes in options.sizes:
            rows += rows_of(ranks, nbytes, [run[str(nbytes)] for run in runs])
    show("all_reduce of float32, one thread a rank", rows, options.json)


if __name__ == "__main__":
    main()
