"""How much more does a step in logical shards cost than a step of DistributedDataParallel, on as many ranks as shards?

    python bench/shards.py [--ranks 2] [--models NAME ...] [--rounds 15] [--json FILE]

Every rank has one thread and one shard, and both compute the same samples. They take turns within the same processes, a
few steps each, so that the machine's moods fall on both alike. Times are medians over the turns; processor time counts
all threads of a rank and is summed over the turns, so it depends less on what else the machine does. Ratio is the step
in shards divided by that of `DistributedDataParallel`.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
from ddp import build, stepper
from report import parser, show
from torch import nn
from turns import leave_rows, rows_of_ranks, take_turns

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
        for step in steps.values():
            for _ in range(SETTLING_STEPS):
                step()
        turns = take_turns(steps, STEPS, lambda done: done < rounds)
        everyones: list[dict[str, float]] = [{}] * ranks
        dist.all_gather_object(everyones, turns.processor_s)
        ms = {kind: 1e3 * statistics.median(each) for kind, each in turns.step_s.items()}
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
    leave_rows(rows, directory)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument("--rounds", type=int, default=ROUNDS, help="how often each takes its turn")
    options = arguments.parse_args()
    rows = rows_of_ranks(rank_main, options.ranks, options.ranks, options.models, options.rounds)
    show(f"A training step on {options.ranks} ranks of one thread, with a shard each", rows, options.json)


if __name__ == "__main__":
    main()
