"""A small model and its optimizer, sharded across ranks in several layouts, with checkpoints of the whole state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

import paceline as dist
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.tensor.layers import slice_of

_MAKING = threading.Lock()  # threads share the random number generator
WIDTH, HIDDEN, VOCABULARY = 7, 10, 11


class Block(nn.Module):
    """A block whose sizes are not divisible by most numbers of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale[0] * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A network whose layer names differ from those that a pipeline assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)  # defined first, but applied last in the forward pass
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x

    def layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]


def built(dtype: torch.dtype = torch.float32) -> Net:
    with _MAKING, torch.random.fork_rng():
        torch.manual_seed(5)
        return Net().to(dtype)


def plan() -> dict[str, dist.ParallelStyle]:
    return {
        "embedding": dist.RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": dist.ColwiseParallel(),
        "blocks.*.down": dist.RowwiseParallel(),
        "head": dist.ColwiseParallel(output_layouts=Replicate()),
    }


def batch(step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, VOCABULARY, (2, rows), generator=generator))  # type: ignore[return-value]


def grouped(module: nn.Module) -> list[dict[str, Any]]:
    """Returns parameter groups with and without weight decay; a rank may have no parameters in a group."""
    weights = [each for each in module.parameters() if each.ndim > 1]
    others = [each for each in module.parameters() if each.ndim == 1]
    return [{"params": others, "weight_decay": 0.0}, {"params": weights}]


def trained(steps: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns the state after training a model that is not sharded."""
    model = built(dtype)
    optimizer = torch.optim.AdamW(grouped(model), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    for at, block in enumerate(model.blocks):
        block.scale.fill_(at + 0.5)
    return {"model": model, "optimizer": optimizer, "steps": steps}


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each dimension (samples, layers, and parts of layers), and how state is sharded."""

    replicas: int
    stages: int
    parts: int
    zero: int = 0
    schedule: str = "1f1b"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.replicas, self.stages, self.parts


def divided(layout: Layout, groups: Sequence[ProcessGroup], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns a rank's part of an untrained model and its optimizer; `groups` are the mesh's groups."""
    replicas, stages, parts = groups
    model = built(dtype)
    nn.init.zeros_(model.head.weight)  # the weight remains zero if it is not loaded
    whole: nn.Module = model
    if layout.parts > 1:
        dist.parallelize_module(model, parts, plan(), src_data_rank=None)
    if layout.stages > 1:
        per_rank = 2 if layout.schedule == "interleaved" else 1
        whole = dist.Pipeline(
            model.layers(),
            nn.functional.cross_entropy,
            micro_batches=layout.stages,
            schedule=layout.schedule,
            stages_per_rank=per_rank,
            group=stages,
            data_parallel_group=replicas if layout.replicas > 1 else None,
            whole=model,
        )
    chosen = grouped(whole)
    if layout.zero:
        optimizer: torch.optim.Optimizer = dist.ZeroRedundancyOptimizer(
            chosen, torch.optim.AdamW, process_group=replicas, stage=layout.zero, lr=0.01
        )
    else:
        optimizer = torch.optim.AdamW(chosen, lr=0.01)
    return {"model": whole, "optimizer": optimizer, "steps": 0}


def require_part(state: dict[str, Any], whole: dict[str, Any]) -> None:
    """Asserts that a rank's part of a model is bitwise equal to the same part of the whole model."""
    mine, model = state["model"], whole["model"]
    expected = model.state_dict()
    rename = mine.whole.key_of if isinstance(mine, dist.Pipeline) else str
    for key, value in mine.state_dict(keep_vars=True).items():
        piece = slice_of(value)
        theirs = expected[rename(key)]
        if piece is not None:
            theirs = theirs.narrow(piece.dim, piece.start, piece.stop - piece.start)
        assert torch.equal(value.detach(), theirs), key
    assert state["steps"] == whole["steps"]


def require_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that two whole states are bitwise equal."""
    for name, value in expected["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[name], value), name
    mine, theirs = (each["optimizer"].state_dict() for each in (state, expected))
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, kept in theirs["state"].items():
        for key, value in kept.items():
            assert torch.equal(mine["state"][number][key], value), (number, key)
    assert state["steps"] == expected["steps"]
