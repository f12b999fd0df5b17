"""Compares the speed of torch.distributed programs on the backend "paceline" with their speed on gloo.

    python bench/plugin.py [--ranks 2] [--sizes BYTES ...] [--json FILE]

Prints two tables: a float32 `torch.distributed.all_reduce`, and a training step of FSDP2 (`fully_shard`) on CPU with a
transformer of 6.8 million parameters. The training step is compared with a step of the unsharded model that has a
barrier after the backward pass ("barrier"). Every rank has one thread; the two backends are groups of the same
processes and alternate. p50 and p95 are computed over the turns, n is the number of calls or steps, and the ratio is a
contestant's median divided by that of "paceline".
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ddp import build, stepper
from report import Spread, compared, human, interleaved, parser, show, spread

SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20]
ROUNDS = 20
FSDP_ROUNDS = 20
FSDP_STEPS = 3


def rank_main(rank: int, ranks: int, sizes: list[int], steps: bool, directory: str) -> None:
    import torch
    import torch.distributed as torch_dist

    import paceline.interop.torch_backend

    paceline.interop.torch_backend.register()
    torch.set_num_threads(1)
    torch_dist.init_process_group("paceline", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    groups = {"paceline": torch_dist.group.WORLD, "gloo": torch_dist.new_group(backend="gloo")}
    results: dict[str, object] = {"all_reduce": {}}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        contestants = {
            name: lambda group=group, tensor=tensor: torch_dist.all_reduce(tensor, group=group)
            for name, group in groups.items()
        }
        waiting = {
            f"{name} async": lambda group=group, tensor=tensor: torch_dist.all_reduce(
                tensor, group=group, async_op=True
            ).wait()
            for name, group in groups.items()
        }
        for call in (*contestants.values(), *waiting.values()):
            for _ in range(3):
                call()
        fast = max(1, min(700, (44 << 20) // max(nbytes, 1 << 16)))
        calls = {name: fast if "paceline" in name else max(1, fast // 8) for name in (*contestants, *waiting)}
        results["all_reduce"][nbytes] = interleaved({**contestants, **waiting}, calls, ROUNDS, torch_dist.barrier)
    if steps:
        results["fsdp"] = fsdp(groups)
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(results))
    torch_dist.barrier()
    torch_dist.destroy_process_group()


def fsdp(groups: dict[str, object]) -> dict[str, Spread]:
    import torch
    import torch.distributed as torch_dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, inputs = build("transformer")
    steps: dict[str, Callable[[], None]] = {}
    for name, group in groups.items():
        sharded = copy.deepcopy(model)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in sharded.encoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        steps[name] = stepper(sharded, inputs)
    steps["barrier"] = stepper(copy.deepcopy(model), inputs, torch_dist.barrier)
    for step in steps.values():
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(FSDP_ROUNDS):
        for name, step in steps.items():
            torch_dist.barrier()
            started = time.perf_counter()
            for _ in range(FSDP_STEPS):
                step()
            times[name].append((time.perf_counter() - started) / FSDP_STEPS)
    return {name: spread(each, FSDP_STEPS) for name, each in times.items()}


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    arguments.add_argument("--no-steps", action="store_true", help="skip FSDP2")
    options = arguments.parse_args()
    import paceline

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        paceline.spawn(rank_main, (options.ranks, options.sizes, not options.no_steps, directory), options.ranks)
        results = json.loads(Path(directory, "result.json").read_text())
    rows: list[dict[str, object]] = []
    for nbytes, spreads in results["all_reduce"].items():
        rows += [{"what": f"all_reduce of {human(int(nbytes))}", **row} for row in compared(spreads, "paceline")]
    if "fsdp" in results:
        rows += [{"what": "a step of FSDP2", **row} for row in compared(results["fsdp"], "paceline")]
    show(f"torch.distributed on {options.ranks} ranks of one thread: paceline and gloo", rows, options.json)


if __name__ == "__main__":
    main()
