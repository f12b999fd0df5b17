"""Measures the duration of a float32 all-reduce with each engine, and through the API of torch.distributed.

    python bench/engines.py [--ranks 2] [--sizes BYTES ...] [--json FILE]

The groups of all engines alternate in the same processes, together with the underlying libraries: mpi4py's Allreduce,
and torch.distributed's own gloo. If `make` has installed Open MPI, it starts the processes, and mpi is included. nccl
is included if there are as many GPUs as ranks. Every rank has one thread. p50 and p95 are computed over the turns, n is
the number of calls, and the ratio is a contestant's median divided by that of the engine `paceline`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from mpi_libraries import open_mpi
from report import Spread, compared, human, interleaved, parser, show

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
ROUNDS = 20
WARM_UP = 5
_SLOW = ("gloo", "torch gloo")

GROUPS: dict[str, object] = {}
TORCH_GROUPS: dict[str, object] = {}


def contestants(nbytes: int, names: list[str]) -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as torch_dist

    import paceline as dist

    tensor = torch.zeros(nbytes // 4)
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        calls[name] = lambda group=GROUPS[name]: dist.all_reduce(tensor, group=group)
    if "nccl" in names:
        calls["nccl"] = _on_gpu(nbytes)
    for name, group in TORCH_GROUPS.items():
        calls[name] = lambda group=group: torch_dist.all_reduce(tensor, group=group)
    if "mpi" in names:
        from mpi4py import MPI

        world, memory = MPI.COMM_WORLD, tensor.numpy()
        calls["bare mpi4py"] = lambda: world.Allreduce(MPI.IN_PLACE, memory)
    return calls


def _on_gpu(nbytes: int) -> Callable[[], object]:
    import torch

    import paceline as dist

    tensor = torch.zeros(nbytes // 4, device="cuda")

    def call() -> None:
        dist.all_reduce(tensor, group=GROUPS["nccl"])
        torch.cuda.synchronize()

    return call


def rank_main(rank: int, ranks: int, sizes: list[int], directory: str, by_mpirun: bool = False) -> None:
    import torch
    import torch.distributed as torch_dist

    import paceline as dist
    import paceline.interop.torch_backend

    torch.set_num_threads(1)
    dist.init_process_group("mpi" if by_mpirun else "paceline")
    rank = dist.get_rank()
    names = ["paceline", "gloo", *(["mpi"] if by_mpirun else [])]
    if dist.is_nccl_available() and torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(rank)
        names.append("nccl")
    GROUPS.update({name: dist.new_group(backend=name) for name in names})
    paceline.interop.torch_backend.register()
    torch_dist.init_process_group("paceline", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    TORCH_GROUPS.update({"plug-in": torch_dist.group.WORLD, "torch gloo": torch_dist.new_group(backend="gloo")})
    results: dict[int, dict[str, Spread]] = {}
    for nbytes in sizes:
        calls = contestants(nbytes, names)
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        fast = max(1, min(100, (32 << 20) // max(nbytes, 1 << 16)))
        counts = {name: max(1, fast // 8) if name in _SLOW else fast for name in calls}
        results[nbytes] = interleaved(calls, counts, ROUNDS, dist.barrier)
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(results))
    dist.barrier()
    torch_dist.destroy_process_group()
    dist.destroy_process_group()


def run(ranks: int, sizes: list[int], directory: str) -> dict[str, dict[str, Spread]]:
    library = open_mpi()
    if library is None:
        import paceline as dist

        dist.spawn(rank_main, (ranks, sizes, directory), ranks)
    else:
        words = ("--worker", directory, "--ranks", str(ranks), "--sizes", *map(str, sizes))
        library.run(ranks, __file__, *words)
    return json.loads(Path(directory, "result.json").read_text())


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments.add_argument("--worker", metavar="DIRECTORY", help="used by this script itself")
    options = arguments.parse_args()
    if options.worker:
        rank_main(-1, options.ranks, options.sizes, options.worker, by_mpirun=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        results = run(options.ranks, options.sizes, directory)
    rows: list[dict[str, object]] = []
    for nbytes in options.sizes:
        rows += [{"size": human(nbytes), **row} for row in compared(results[str(nbytes)], "paceline")]
    show(f"all_reduce of float32 on {options.ranks} ranks, by engine", rows, options.json)


if __name__ == "__main__":
    main()
