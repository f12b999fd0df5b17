"""How long does an all-reduce of float32 take, against torch's gloo and an MPI library?

    python bench/all_reduce.py [--ranks 2 4] [--json FILE]

Every rank has one thread. Paceline and gloo take turns within the same processes; the MPI library (if mpi4py and mpirun
are there) runs between them in processes of its own, three times. Medians.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from report import human, interleaved, parser, seconds_per_call, show

SIZES = [4, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20, 128 << 20]
ROUNDS = 5
WARM_UP = 3


def calls_for(nbytes: int, slow: bool) -> int:
    """Enough calls for some 50 ms of the slower contestant."""
    budget = 200 if slow else 2000
    return max(3, min(budget, (256 << 20) // max(nbytes, 1 << 16)))


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
            "shared": lambda tensor=shared: dist.all_reduce(tensor),
            "gloo": lambda tensor=plain: gloo.all_reduce(tensor),
        }
        calls = {"paceline": calls_for(nbytes, False), "shared": calls_for(nbytes, False)}
        calls["gloo"] = calls_for(nbytes, True) if ranks == 2 else max(3, calls_for(nbytes, True) // 8)
        for call in contestants.values():
            for _ in range(WARM_UP):
                call()
        results[nbytes] = interleaved(contestants, calls, ROUNDS)
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
        results[str(nbytes)] = statistics.median(
            seconds_per_call(call, calls_for(nbytes, False)) for _ in range(ROUNDS)
        )
    if world.rank == 0:
        Path(result).write_text(json.dumps(results))


def run_mpi(ranks: int, sizes: list[int], directory: str) -> dict[str, float] | None:
    if find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        return None
    result = f"{directory}/mpi.json"
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), sys.executable, __file__]
    command += ["--mpi-worker", result, "--sizes", *map(str, sizes)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        print(f"the MPI library is left out: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    return json.loads(Path(result).read_text())


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
        ours: list[dict[str, dict[str, float]]] = []
        theirs: list[dict[str, float]] = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as directory:
                dist.spawn(rank_main, (ranks, options.sizes, directory), ranks)
                ours.append(json.loads(Path(directory, "result.json").read_text()))
                mpi = run_mpi(ranks, options.sizes, directory)
                if mpi is not None:
                    theirs.append(mpi)
        for nbytes in options.sizes:
            us = {
                name: 1e6 * statistics.median(run[str(nbytes)][name] for run in ours)
                for name in ("paceline", "shared", "gloo")
            }
            row: dict[str, object] = {"ranks": ranks, "size": human(nbytes), "paceline µs": us["paceline"]}
            row |= {"shared µs": us["shared"], "gloo µs": us["gloo"], "gloo / paceline": us["gloo"] / us["paceline"]}
            row["paceline / shared"] = us["paceline"] / us["shared"]
            if theirs:
                mpi_us = 1e6 * statistics.median(float(run[str(nbytes)]) for run in theirs)
                row |= {f"{theirs[0]['library']} µs": mpi_us, "MPI / paceline": mpi_us / us["paceline"]}
            rows.append(row)
    show("all_reduce of float32, one thread a rank", rows, options.json)


if __name__ == "__main__":
    main()
