"""Measures how much longer a step takes with one logical shard per rank than with DistributedDataParallel.

    python bench/shards.py [--ranks 2] [--models NAME ...] [--rounds 15] [--json FILE]

Every rank has one thread and one shard, and all contestants use the same samples. They alternate in the same processes,
a few steps at a time, so that changes in the machine's load affect all of them equally. "barrier" is the bare model
with a barrier after the backward pass. n is the number of steps; p50 and p95 are computed over the turns. The processor
time includes all threads of a rank and is summed over the turns, so it depends less on other load. The ratios are
relative to the step time of `DistributedDataParallel`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from ddp import build, stepper
from report import parser, show
from torch import nn
from turns import leave_rows, rows_of_ranks, rows_of_steps, take_turns

MODELS = ["transformer", "CNN"]
ROUNDS = 20
STEPS = 4
SETTLING_STEPS = 8  # warm-up steps, until the memory stops growing


def shards_stepper(model: nn.Module, x: torch.Tensor, rank: int, ranks: int) -> Callable[[], None]:
    import paceline as dist
    from paceline.train.logical_shards.shard_batches import ShardBatch

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
    made: list[dict[str, object]] = []
    for name in names:
        torch.manual_seed(rank)  # all ranks start from rank 0's model, with different batches
        model, x = build(name)
        steps = {
            "barrier": stepper(copy.deepcopy(model), x, dist.barrier),
            "DDP": stepper(dist.DistributedDataParallel(copy.deepcopy(model)), x),
            "shards": shards_stepper(model, x, rank, ranks),
        }
        for step in steps.values():
            for _ in range(SETTLING_STEPS):
                step()
        turns = take_turns(steps, STEPS, lambda done: done < rounds)
        everyones: list[dict[str, float]] = [{}] * ranks
        dist.all_gather_object(everyones, turns.processor_s)
        cpu_ms = {kind: 1e3 * sum(each[kind] for each in everyones) / (rounds * STEPS * ranks) for kind in steps}
        table = rows_of_steps(turns.step_s, STEPS)
        medians = {row["step"]: row["p50 ms"] for row in table}
        for row in table:
            kind = str(row["step"])
            ratios = {"ratio": medians[kind] / medians["DDP"], "CPU ratio": cpu_ms[kind] / cpu_ms["DDP"]}
            millions = sum(p.numel() for p in model.parameters()) / 1e6
            made.append({"model": name, "params M": millions, **row, "CPU ms": cpu_ms[kind], **ratios})
    leave_rows(made, directory)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    arguments.add_argument("--rounds", type=int, default=ROUNDS, help="number of turns of each contestant")
    options = arguments.parse_args()
    rows = rows_of_ranks(rank_main, options.ranks, options.ranks, options.models, options.rounds)
    show(f"A training step on {options.ranks} ranks of one thread, with a shard each", rows, options.json)


if __name__ == "__main__":
    main()
