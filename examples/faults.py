"""Trains a small model with a fault of your choice, with Paceline or, for comparison, with torch.distributed.

paceline run --nproc-per-node 4 examples/faults.py late               (rank 1 does not reach a call)
paceline run --nproc-per-node 4 examples/faults.py disagree           (rank 1 passes a tensor of a different size)
paceline run --nproc-per-node 4 examples/faults.py slow               (rank 1 takes longer for each step)
torchrun --nproc-per-node 4 examples/faults.py late --library torch   (with torch.distributed and gloo)
"""

import argparse
import time

import torch
from torch import nn

arguments = argparse.ArgumentParser(description="A training loop with a fault on rank 1")
arguments.add_argument("fault", choices=["late", "disagree", "slow"])
arguments.add_argument("--library", choices=["paceline", "torch"], default="paceline")
arguments.add_argument("--steps", type=int, default=400)
options = arguments.parse_args()

if options.library == "paceline":
    import paceline as dist

    dist.init_process_group()
    wrap = dist.DistributedDataParallel
else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    wrap = nn.parallel.DistributedDataParallel
rank = dist.get_rank()


def next_batch(step: int) -> torch.Tensor:
    """Returns a random batch. With the fault "late", rank 1 sleeps here after half of the steps."""
    if options.fault == "late" and rank == 1 and step == options.steps // 2:
        time.sleep(3600)
    if options.fault == "slow" and rank == 1:
        time.sleep(0.01)
    return torch.randn(32, 64)


def average_metrics() -> None:
    """Averages four metrics over the ranks. With the fault "disagree", rank 1 has five."""
    metrics = torch.zeros(5 if options.fault == "disagree" and rank == 1 else 4)
    dist.all_reduce(metrics)


torch.manual_seed(rank)
model = wrap(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(options.steps):
    optimizer.zero_grad()
    model(next_batch(step)).square().mean().backward()
    optimizer.step()
    if (step + 1) % 100 == 0:
        average_metrics()
        if rank == 0:
            print(f"step {step + 1} of {options.steps}", flush=True)
if rank == 0:
    print(f"\nResult: the training loop reached step {options.steps} with the fault {options.fault!r}.")
dist.destroy_process_group()
