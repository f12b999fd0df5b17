"""Compares a step with one copy of the model per host to a step with a full optimizer on each rank.

    python bench/shared_model.py [--ranks 2] [--models NAME ...] [--steps N] [--json FILE]

The contestants alternate in the same processes, a few steps at a time, so that changes in the machine's load affect all
of them equally. "barrier" runs a barrier after the backward pass, and then AdamW on all parameters: no synchronous
method can be faster unless the ranks share work. "barrier" runs with each of torch's implementations of AdamW. A
contestant's ratio is the step time of the faster implementation divided by the contestant's step time. "one copy" is
SharedModelOptimizer, "ZeRO" is stage 1 of either library, and the other labels are self-explanatory. n is the number of
steps; p50 and p95 are those of rank 0. The wide MLP has a batch of 16, so its step is dominated by memory access.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ddp import build
from report import columns_of, parser, show, spread
from torch import nn

MODELS = ["wide MLP", "transformer"]
STEPS = 4  # steps per turn
WARM_UP = 3


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, x = build(name)
    return (model, x[:16].contiguous()) if name == "wide MLP" else (model, x)


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, before: Callable[[], object] = int
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before()
        optimizer.step()

    return step


def contestants(name: str) -> dict[str, Callable[[], None]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    import paceline as dist

    model, x = make(name)
    options = {"lr": 1e-4, "fused": True}
    adamw = torch.optim.AdamW

    def bare(**options: object) -> Callable[[], None]:
        mine = copy.deepcopy(model)
        return stepper(mine, adamw(mine.parameters(), lr=1e-4, **options), x, dist.barrier)

    def wrapped(wrap: Callable[[nn.Module], nn.Module], make_optimizer: Callable[..., object]) -> Callable[[], None]:
        mine = wrap(copy.deepcopy(model))
        return stepper(mine, make_optimizer(mine.parameters(), adamw, **options), x)

    def plain(params: object, optimizer_class: type[torch.optim.Optimizer], **options: object) -> object:
        return optimizer_class(params, **options)

    torchs, ours = nn.parallel.DistributedDataParallel, dist.DistributedDataParallel
    shared = copy.deepcopy(model)
    return {
        "barrier, fused": bare(fused=True),
        "barrier, foreach": bare(foreach=True),
        "one copy": stepper(shared, dist.SharedModelOptimizer(shared, adamw, **options), x),
        "Paceline DDP": wrapped(ours, plain),
        "Paceline ZeRO": wrapped(ours, dist.ZeroRedundancyOptimizer),
        "torch DDP": wrapped(torchs, plain),
        "torch ZeRO": wrapped(torchs, ZeroRedundancyOptimizer),
    }


def rank_main(rank: int, ranks: int, names: list[str], steps: int, directory: str) -> None:
    import torch.distributed as gloo

    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    gloo.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=ranks)
    rows: list[dict[str, object]] = []
    for name in names:
        torch.manual_seed(rank)  # all ranks start from rank 0's model, with different batches
        all_steps = contestants(name)
        times: dict[str, list[float]] = {kind: [] for kind in all_steps}
        for at in range(WARM_UP + -(-steps // STEPS)):
            for kind, step in all_steps.items():
                dist.barrier()
                for _ in range(STEPS):
                    started = time.perf_counter()
                    step()
                    if at >= WARM_UP:
                        times[kind].append(time.perf_counter() - started)
        medians = {kind: statistics.median(each) for kind, each in times.items()}
        baseline = min(median for kind, median in medians.items() if kind.startswith("barrier"))
        rows += [
            {
                "model": name,
                "step": kind,
                **columns_of(spread(each), "ms"),
                "ratio": baseline / medians[kind],
            }
            for kind, each in times.items()
        ]
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(rows))
    dist.barrier()
    gloo.destroy_process_group()


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=[*MODELS, "CNN", "200 tiny layers"])
    arguments.add_argument("--steps", type=int, default=60, help="number of steps of each contestant")
    options = arguments.parse_args()
    import paceline as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.spawn(rank_main, (options.ranks, options.models, options.steps, directory), options.ranks)
        rows = json.loads(Path(directory, "result.json").read_text())
    show(f"A step with AdamW on {options.ranks} ranks of one thread", rows, options.json)


if __name__ == "__main__":
    main()
