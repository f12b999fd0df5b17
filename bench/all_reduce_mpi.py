"""Measures the duration of a float32 all-reduce on one host with Paceline and with three MPI libraries.

    python bench/all_reduce_mpi.py [--ranks 2] [--sizes BYTES ...] [--intel DIR] [--turns 100] [--repeats 3] [--json F]

Each library starts its own processes, in which it alternates with Paceline in short turns. The libraries run one at a
time, and the whole measurement is repeated `--repeats` times. `make` installs Open MPI and MPICH. Intel MPI (the wheel
`impi-rt`) is installed into DIR, by default the `impi` folder in this environment. "paceline" is Paceline's plain call,
and "persistent" is its persistent call. The libraries run their plain call with MPI_IN_PLACE through mpi4py. The times
are seconds per call in a turn: the median (p50), the 95th percentile and the minimum. n is the number of calls, and *
marks the library with the lowest median. Every rank has one thread.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from mpi_libraries import Library, libraries
from report import human, parser, seconds_per_call, show

SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
WARM_UP = 20

Turns = dict[str, list[float]]  # seconds per call in each turn, by contestant


def calls_of_a_turn(nbytes: int) -> int:
    return max(4, min(100, (4 << 20) // max(nbytes, 1 << 12)))


def measure(nbytes: int, turns: int) -> Turns:
    import torch
    from mpi4py import MPI

    import paceline as dist

    tensor, theirs = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    world, memory = MPI.COMM_WORLD, theirs.numpy()
    calls: dict[str, Callable[[], object]] = {
        "paceline": lambda: dist.all_reduce(tensor),
        "persistent": dist.all_reduce_init(tensor),
        "library": lambda: world.Allreduce(MPI.IN_PLACE, memory),
    }
    times: Turns = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(seconds_per_call(call, calls_of_a_turn(nbytes)))
    return times


def rank_main(directory: str) -> None:
    import torch
    from mpi4py import MPI

    import paceline as dist

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    options = json.loads(Path(directory, "options.json").read_text())
    store = f"file://{directory}/store"
    dist.init_process_group("paceline", init_method=store, rank=world.rank, world_size=world.size)
    results = {nbytes: measure(nbytes, options["turns"]) for nbytes in options["sizes"]}
    if world.rank == 0:
        Path(directory, "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run(library: Library, ranks: int, options: dict[str, object]) -> dict[str, Turns]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "options.json").write_text(json.dumps(options))
        library.run(ranks, __file__, "--worker", directory)
        return json.loads(Path(directory, "result.json").read_text())


def rows_of(nbytes: int, runs: dict[str, list[Turns]]) -> list[dict[str, object]]:
    """Returns the rows for one size: each library compared with Paceline, with a mark for the fastest library."""
    rows: list[dict[str, object]] = []
    for name, repeats in runs.items():
        row: dict[str, object] = {"size": human(nbytes), "library": name}
        merged = {who: [seconds for turns in repeats for seconds in turns[who]] for who in repeats[0]}
        for who, seconds in merged.items():
            row[f"{who} p50 µs"] = 1e6 * statistics.median(seconds)
            row[f"{who} p95 µs"] = 1e6 * statistics.quantiles(seconds, n=20)[-1]
            row[f"{who} least µs"] = 1e6 * min(seconds)
        row["library / paceline"] = statistics.median(merged["library"]) / statistics.median(merged["paceline"])
        row["n"] = len(merged["paceline"]) * calls_of_a_turn(nbytes)
        rows.append(row)
    best = min(rows, key=lambda row: float(str(row["library p50 µs"])))
    best["fastest"] = "*"
    return rows


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments.add_argument("--turns", type=int, default=100)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--intel", default="default", metavar="DIR")
    arguments.add_argument("--worker", metavar="DIRECTORY", help="used by this script itself")
    chosen = arguments.parse_args()
    if chosen.worker:
        rank_main(chosen.worker)
        return
    found = libraries(chosen.intel)
    options: dict[str, object] = {"sizes": chosen.sizes, "turns": chosen.turns}
    runs: dict[str, list[dict[str, Turns]]] = {each.name: [] for each in found}
    for _ in range(chosen.repeats):
        for library in found:
            runs[library.name].append(run(library, chosen.ranks, options))
    rows = [
        row
        for nbytes in chosen.sizes
        for row in rows_of(nbytes, {name: [each[str(nbytes)] for each in repeats] for name, repeats in runs.items()})
    ]
    show(f"all_reduce of float32 on {chosen.ranks} ranks of one host, against MPI libraries", rows, chosen.json)


if __name__ == "__main__":
    main()
