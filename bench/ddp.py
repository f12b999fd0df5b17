"""Compares training steps of Paceline's data parallelism, of torch's DDP over gloo, and of a bare model.

    python bench/ddp.py [--ranks 2] [--models NAME ...] [--json FILE]

Every rank has one thread and its own batch. The contestants alternate in the same processes, a few steps at a time, so
that changes in the machine's load affect all of them equally. "none" runs the bare module on every rank at once.
"barrier" adds a barrier after the backward pass; no synchronous method can be faster unless the ranks share work.
Efficiency is the step time of "none" divided by the contestant's step time, and "of barrier" is the step time of
"barrier" divided by the contestant's step time. n is the number of steps; p50 and p95 are computed over the turns.
"waiting" is the share of Paceline's step that is spent at the end of the backward pass, reducing and waiting for
reductions. The memory added is the amount by which wrapping and training increase a process's memory beyond that of the
bare model; compare it with the size of the gradients.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from report import parser, show
from torch import nn
from turns import leave_rows, rows_of_ranks, rows_of_steps, take_turns

ROUNDS = 20
STEPS = 4
SETTLING_STEPS = 8  # warm-up steps of the bare model, until its memory stops growing
LEARNING_RATE = 1e-6  # the loss is a sum and has no minimum: with larger steps it diverges within the run


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 256)
            layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
            self.head = nn.Linear(256, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.embed(x))).mean((1, 2))

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:6]:
                x = torch.relu(layer(x))
            return x

    if name == "transformer":
        return Transformer(), torch.randint(0, 1000, (8, 64))
    if name == "wide MLP":
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
        return model, torch.randn(64, 1024)
    if name == "CNN":
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 128, 256):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)), torch.randn(
            16, 3, 32, 32
        )
    if name == "unused":
        return Unused(), torch.randn(64, 512)
    return nn.Sequential(*(m for _ in range(200) for m in (nn.Linear(32, 32), nn.ReLU()))), torch.randn(64, 32)


MODELS = ["transformer", "wide MLP", "CNN", "unused", "200 tiny layers"]


def private_bytes() -> int:
    """Returns this process's private memory plus its share of shared memory, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not tell Pss")


def stepper(model: torch.nn.Module, x: torch.Tensor, before: Callable[[], object] = int) -> Callable[[], None]:
    """Returns a function that runs one step and calls `before` between the backward pass and the optimizer step."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        before()
        optimizer.step()

    return step


def rank_main(rank: int, ranks: int, names: list[str], directory: str) -> None:
    import torch.distributed as gloo

    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group()
    gloo.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=ranks)
    rows: list[dict[str, object]] = []
    for name in names:
        torch.manual_seed(rank)  # all ranks start from rank 0's model, with different batches
        model, x = build(name)
        skips = name == "unused"

        bare = copy.deepcopy(model)
        step = stepper(bare, x)
        for _ in range(SETTLING_STEPS):
            step()
        gc.collect()
        before = private_bytes()
        ours = dist.DistributedDataParallel(bare, find_unused_parameters=skips)
        wrapped_step = stepper(ours, x)
        for _ in range(3):
            wrapped_step()
        gc.collect()
        added = private_bytes() - before
        steps = {
            "none": stepper(copy.deepcopy(model), x),
            "barrier": stepper(copy.deepcopy(model), x, dist.barrier),
            "Paceline DDP": wrapped_step,
            "torch DDP": stepper(torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=skips), x),
        }
        for one in steps.values():
            one()
        waited = ours.communication_wait_s()
        times = take_turns(steps, STEPS, lambda done: done < ROUNDS).step_s
        ran = sum(times["Paceline DDP"]) * STEPS
        gradients = sum(p.nbytes for p in bare.parameters())
        measured = {
            "waiting": (ours.communication_wait_s() - waited) / ran,
            "memory added MiB": added / 2**20,
            "gradients MiB": gradients / 2**20,
        }
        rows += [
            {"model": name, "params M": gradients / 4e6, **row, **(measured if row["step"] == "Paceline DDP" else {})}
            for row in rows_of_steps(times, STEPS)
        ]
    leave_rows(rows, directory)
    gloo.destroy_process_group()


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    options = arguments.parse_args()
    rows = rows_of_ranks(rank_main, options.ranks, options.ranks, options.models)
    show(f"A training step on {options.ranks} ranks of one thread", rows, options.json)


if __name__ == "__main__":
    main()
