"""Compares the duration of a persistent call with the durations of the plain call and of MPI's persistent call.

    python bench/persistent.py [--ranks 2] [--sizes BYTES ...] [--calls NAME ...] [--turns 300] [--json FILE]

The contestants alternate in short turns in the same processes. One MPI library at a time starts these processes: Open
MPI and MPICH if `make` has installed them, and Intel MPI if `bench/all_reduce_mpi.py` has installed it. Without an MPI
library, Paceline runs alone. "MPI init" is `Allreduce_init` or its equivalent, with Start and Wait, through mpi4py; it
requires a library that implements MPI 4. "MPI" is the plain call. The times are seconds per call in a turn: the median
(p50), the 95th percentile and the fastest turn. n is the number of calls, and "beside" is the library whose processes
ran the call. Every rank has one thread. If a library crashes in its persistent calls (Intel MPI 2021.18 does, in
Start), only its plain calls are measured.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mpi_libraries import Library, libraries
from report import human, parser, seconds_per_call, show

SIZES = [4, 1 << 10, 16 << 10, 64 << 10]
CALLS = ["all_reduce", "broadcast", "all_gather_into_tensor", "barrier"]
WARM_UP = 20

Contestants = dict[str, Callable[[], object]]


def contestants(
    name: str, nbytes: int, world: object | None, persistent_mpi: bool, undo: contextlib.ExitStack
) -> Contestants:
    import torch

    import paceline as dist

    count, size = nbytes // 4, dist.get_world_size()
    tensor, whole = torch.zeros(count), torch.zeros(count * size)
    arguments = {
        "all_reduce": (tensor,),
        "broadcast": (tensor, 0),
        "all_gather_into_tensor": (whole, tensor),
        "barrier": (),
    }[name]
    plain, prepared = getattr(dist, name), getattr(dist, f"{name}_init")(*arguments)

    def started() -> None:
        prepared.start()
        prepared.wait()

    calls = {"plain": lambda: plain(*arguments), "persistent": prepared, "start and wait": started}
    if world is None:
        return calls
    return calls | _of_mpi(world, name, tensor.numpy(), whole.numpy(), undo if persistent_mpi else None)


def _of_mpi(world: object, name: str, tensor: object, whole: object, undo: contextlib.ExitStack | None) -> Contestants:
    from mpi4py import MPI

    method, arguments = {
        "all_reduce": ("Allreduce", (MPI.IN_PLACE, tensor)),
        "broadcast": ("Bcast", (tensor,)),
        "all_gather_into_tensor": ("Allgather", (tensor, whole)),
        "barrier": ("Barrier", ()),
    }[name]
    call = getattr(world, method)
    calls: Contestants = {"MPI": lambda: call(*arguments)}
    if undo is None:
        return calls
    try:
        request = getattr(world, f"{method}_init")(*arguments)
    except NotImplementedError:  # the library is older than MPI 4
        return calls
    undo.callback(request.Free)

    def started() -> None:
        request.Start()
        request.Wait()

    return calls | {"MPI init": started}


def measure(calls: Contestants, nbytes: int, turns: int) -> dict[str, tuple[int, list[float]]]:
    """Returns the number of calls per turn, and the seconds per call in each turn."""
    a_turn = max(4, min(100, (1 << 20) // max(nbytes, 1 << 12)))
    counts = {name: max(4, a_turn // 4) if name == "start and wait" else a_turn for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(seconds_per_call(call, counts[name]))
    return {name: (counts[name], seconds) for name, seconds in times.items()}


def rank_main(rank: int, ranks: int, options: dict[str, list], directory: str, world: object | None = None) -> None:
    import torch

    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group("paceline", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    results = []
    for name in options["calls"]:
        for nbytes in options["sizes"] if name != "barrier" else [0]:
            with contextlib.ExitStack() as undo:
                calls = contestants(name, nbytes, world, options["persistent_mpi"], undo)
                times = measure(calls, nbytes, options["turns"])
            results.append((name, nbytes, times))
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def mpi_main(directory: str) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    options = json.loads(Path(directory, "options.json").read_text())
    rank_main(world.rank, world.size, options, directory, world)


def run(ranks: int, options: dict[str, object], library: Library | None) -> list:
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "options.json").write_text(json.dumps(options))
        if library is None:
            dist.spawn(rank_main, (ranks, options, directory), ranks)
        else:
            library.run(ranks, __file__, "--worker", directory)
        return json.loads(Path(directory, "result.json").read_text())


def run_beside(ranks: int, options: dict[str, object], library: Library | None) -> list:
    """Runs the calls in a library's processes; omits the library's persistent calls if the library crashes in them."""
    try:
        return run(ranks, options, library)
    except subprocess.CalledProcessError:
        if library is None:
            raise
        print(f"{library.name} crashed in its persistent calls: its plain ones are measured", file=sys.stderr)
        return run(ranks, {**options, "persistent_mpi": False}, library)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments.add_argument("--calls", nargs="+", default=CALLS, choices=CALLS, metavar="NAME")
    arguments.add_argument("--turns", type=int, default=300)
    arguments.add_argument("--worker", metavar="DIRECTORY", help="used by this script itself")
    chosen = arguments.parse_args()
    if chosen.worker:
        mpi_main(chosen.worker)
        return
    options = {"calls": chosen.calls, "sizes": chosen.sizes, "turns": chosen.turns, "persistent_mpi": True}
    found: list[Library] = libraries()
    rows: list[dict[str, object]] = []
    for library in found or [None]:
        for name, nbytes, times in run_beside(chosen.ranks, options, library):
            ours = statistics.median(times["persistent"][1])
            for contestant, (a_turn, seconds) in times.items():
                called = contestant.replace("MPI", library.name) if library else contestant
                rows.append(
                    {
                        "call": name,
                        "size": human(nbytes) if nbytes else "-",
                        "by": called,
                        "beside": library.name if library else "-",
                        "p50 µs": 1e6 * statistics.median(seconds),
                        "p95 µs": 1e6 * statistics.quantiles(seconds, n=20)[-1],
                        "fastest µs": 1e6 * min(seconds),
                        "p50 / persistent": statistics.median(seconds) / ours,
                        "n": len(seconds) * a_turn,
                    }
                )
    show(f"persistent calls on {chosen.ranks} ranks of one thread", rows, chosen.json)


if __name__ == "__main__":
    main()
