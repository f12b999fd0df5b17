"""Trains a model with torch.distributed and gloo. A launcher starts this program, which does not import Paceline.

    torchrun --nproc-per-node 2 program.py WAY MODEL BLOCKS STEPS

WAY is "ddp", "fsdp" or "by hand" (an all-reduce of each gradient). The bare model and the distributed model are trained
alternately, BLOCKS times, for STEPS steps each. Rank 0 prints the seconds per step in each block, and the sum of its
parameters at the end.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from ddp import build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

SETTLING_STEPS = 3
LEARNING_RATE = 1e-6  # the loss is a sum and has no minimum


def average_gradients(model: nn.Module) -> None:
    """Averages each gradient with an all-reduce, as tutorials do before they introduce DistributedDataParallel."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def distributed(model: nn.Module, way: str) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Returns the distributed model, and the function to call between the backward pass and the optimizer step."""
    if way == "ddp":
        return DistributedDataParallel(model), lambda _: None
    if way == "fsdp":
        for layer in model.encoder.layers:
            fully_shard(layer)
        return fully_shard(model), lambda _: None
    return model, average_gradients


def training(model: nn.Module, x: torch.Tensor, after_backward: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Returns a function that runs one training step."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        after_backward(model)
        optimizer.step()

    return step


def total(model: nn.Module) -> float:
    """Returns the sum of all parameters. This is a collective call."""
    values = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return float(sum(each.detach().double().sum() for each in values))


def main() -> None:
    way, name, blocks, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, _ = build(name)
    torch.manual_seed(dist.get_rank() + 1)
    _, x = build(name)
    bare = training(copy.deepcopy(model), x, lambda _: None)
    trained, after_backward = distributed(model, way)
    kinds = {"bare": bare, "distributed": training(trained, x, after_backward)}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in kinds.values():
        for _ in range(SETTLING_STEPS):
            step()
    for _ in range(blocks):
        for kind, step in kinds.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            times[kind].append((time.perf_counter() - started) / steps)
    at_the_end = total(trained)
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "parameters": at_the_end}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
