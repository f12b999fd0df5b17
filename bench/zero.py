"""Measures the memory that each stage of ZeRO needs on a rank, and the duration of a step.

    python bench/zero.py [--ranks 2] [--models NAME ...] [--overlap] [--json FILE]

"barrier" is the bare model with AdamW on every rank and a barrier after the backward pass. Stage 0 is
DistributedDataParallel with AdamW on every rank. The numbers of bytes are maxima over the ranks. They are given for the
optimizer state, for gradients at the end of the backward pass, for parameters between steps, and for parameters at
their peak in the forward pass. "share" is the optimizer state divided by that of stage 0; compare it with 1 / ranks.
"loss apart" is the largest difference between any rank's loss and that of stage 0 over the steps. n, p50 and p95 are
those of rank 0's steps. Every rank has one thread and its own batch. --overlap averages gradients during the backward
pass, and gathers the parameters of stage 3 one layer ahead.
"""

from __future__ import annotations

import time

import torch
from ddp import build
from report import columns_of, parser, show, spread
from torch import nn
from turns import leave_rows, rows_of_ranks

STEPS = 20
MODELS = ["transformer", "wide MLP"]


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Returns the parameters, and the flat tensors that the optimizer updates instead of individual parameters."""
    runs = [] if optimizer is None else list(optimizer.state)
    return list({id(each): each for each in (*model.parameters(), *runs)}.values())


def parameter_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    storages = [each.untyped_storage() for each in tensors(model, optimizer)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gradient_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return sum(each.grad.nbytes for each in tensors(model, optimizer) if each.grad is not None)


def barrier_steps(name: str, rank: int) -> dict[str, object]:
    """Trains the bare model on every rank; returns the durations of its steps."""
    import paceline as dist

    torch.manual_seed(rank)
    model, x = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times_s: list[float] = []
    for _ in range(STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        dist.barrier()
        optimizer.step()
        loss.item()
        times_s.append(time.perf_counter() - started)
    return columns_of(spread(times_s), "ms")


def rank_main(rank: int, names: list[str], overlap: bool, directory: str) -> None:
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    rows: list[dict[str, object]] = []
    for name in names:
        unsharded: list[float] = []
        whole = 0.0
        rows.append({"model": name, "stage": "barrier", **barrier_steps(name, rank)})
        for stage in range(4):
            torch.manual_seed(rank)  # all ranks start from rank 0's model
            model, x = build(name)
            peak = 0

            def look(module: nn.Module, inputs: object, output: object, model: nn.Module = model) -> None:
                nonlocal peak
                peak = max(peak, parameter_bytes(model))

            for module in model.modules():
                module.register_forward_hook(look)
            trained = dist.DistributedDataParallel(model) if stage == 0 else model
            if stage == 0:
                optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
            else:
                optimizer = dist.ZeroRedundancyOptimizer(
                    model, torch.optim.AdamW, overlap=overlap, stage=stage, lr=1e-4
                )
            losses: list[float] = []
            times_s: list[float] = []
            for _ in range(STEPS):
                started = time.perf_counter()
                optimizer.zero_grad()
                loss = trained(x).square().mean()
                loss.backward()
                gradients = gradient_bytes(model, optimizer)
                optimizer.step()
                losses.append(loss.item())
                times_s.append(time.perf_counter() - started)
            state = sum(each.nbytes for values in optimizer.state.values() for each in values.values())
            if stage == 0:
                unsharded = losses
            apart = max(abs(mine - other) for mine, other in zip(losses, unsharded, strict=True))
            most = torch.tensor([state, gradients, parameter_bytes(model, optimizer), peak, apart], dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if stage == 0:
                whole = most[0].item()
            columns = ["optimizer MiB", "gradients MiB", "parameters MiB", "peak parameters MiB"]
            row = {column: value / 2**20 for column, value in zip(columns, most.tolist()[:4], strict=True)}
            rows.append(
                {
                    "model": name,
                    "stage": stage,
                    **row,
                    "share": most[0].item() / whole,
                    "loss apart": most[4].item(),
                    **columns_of(spread(times_s), "ms"),
                }
            )
            del optimizer, trained, model
    leave_rows(rows, directory)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=["transformer", "wide MLP", "CNN"])
    arguments.add_argument("--overlap", action="store_true")
    options = arguments.parse_args()
    rows = rows_of_ranks(rank_main, options.ranks, options.models, options.overlap)
    show(f"ZeRO on {options.ranks} ranks of one thread, AdamW", rows, options.json)


if __name__ == "__main__":
    main()
