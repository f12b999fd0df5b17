"""How much more does a step in logical shards cost than a step of DistributedDataParallel, on as many ranks as shards?

    python bench/shards.py [--ranks 2] [--models NAME ...] [--rounds 15] [--json FILE]

Every rank has one thread and one shard, and both compute the same samples. They take turns within the same processes, a
few steps each, so that the machine's moods fall on both alike. Times are medians over the turns; processor time counts
all threads of a rank and is summed over the turns, so it depends less on what else the machine does. Ratio is the step
in shards divided by that of `DistributedDataParallel`.
"""

from __future__ import annotations

import copy
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ddp import build, stepper
from report import parser, show
from torch import nn

MODELS = ["transformer", "CNN"]
ROUNDS = 15
STEPS = 4
SETTLING_STEPS = 8  # in which the allocator still grows


def shards_stepper(model: nn.Module, x: torch.Tensor, rank: int, ranks: int) -> Callable[[], None]:
    import paceline as dist
    from paceline.parallel.sharded.batches import ShardBatch

    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    shards = dist.LogicalShards(model, ranks)
    batches = [ShardBatch((0, 0, rank), 1 / ranks, x)]

    def step() -> None:
        optimizer.zero_grad()
        shards.backward(lambda samples: model(samples).sum(), batches)
        optimizer.step()

    return step


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rank_main(rank: int, ranks: int, names: list[str], rounds: int, directory: str) -> None:
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    rows = []
    for name in names:
        torch.manual_seed(rank)  # rank 0's model goes to all; the batches differ
        model, x = build(name)
        steps = {
            "DDP": stepper(dist.DistributedDataParallel(copy.deepcopy(model)), x),
            "shards": shards_stepper(model, x, rank, ranks),
        }
        wall: dict[str, list[float]] = {kind: [] for kind in steps}
        used: dict[str, float] = dict.fromkeys(steps, 0.0)
        for step in steps.values():
            for _ in range(SETTLING_STEPS):
                step()
        for _ in range(rounds):
            for kind, step in steps.items():
                dist.barrier()
                started, used_before = time.perf_counter(), processor_seconds()
                for _ in range(STEPS):
                    step()
                wall[kind].append((time.perf_counter() - started) / STEPS)
                used[kind] += processor_seconds() - used_before
        everyones: list[dict[str, float]] = [{}] * ranks
        dist.all_gather_object(everyones, used)
        ms = {kind: 1e3 * statistics.median(each) for kind, each in wall.items()}
        cpu = {kind: 1e3 * sum(each[kind] for each in everyones) / (rounds * STEPS * ranks) for kind in steps}
        rows.append(
            {
                "model": name,
                "params M": sum(p.numel() for p in model.parameters()) / 1e6,
                "DDP ms": ms["DDP"],
                "shards ms": ms["shards"],
                "ratio": ms["shards"] / ms["DDP"],
                "DDP CPU ms": cpu["DDP"],
                "shards CPU ms": cpu["shards"],
                "CPU ratio": cpu["shards"] / cpu["DDP"],
            }
        )
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(rows))
    dist.barrier()


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument("--rounds", type=int, default=ROUNDS, help="how often each takes its turn")
    options = arguments.parse_args()
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.spawn(rank_main, (options.ranks, options.models, options.rounds, directory), options.ranks)
        rows = json.loads(Path(directory, "result.json").read_text())
    show(f"A training step on {options.ranks} ranks of one thread, with a shard each", rows, options.json)


if __name__ == "__main__":
    main()
