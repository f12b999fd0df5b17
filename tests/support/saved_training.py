"""Training loops whose state is saved and loaded: data parallel, ZeRO, one copy of the model, and logical shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline as dist

KINDS = ("plain", "zero1", "zero2", "zero3", "one copy")
Contents = dict[str, Any]


class Net(nn.Module):
    """A network with buffers, two dtypes, and layers that ZeRO splits, one of which is not in row-major order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(32)
        self.wide = nn.Linear(32, 150)
        self.last = nn.Linear(150, 3).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.last(self.wide(features).relu().bfloat16()).float()


class Loop:
    """A training run of one kind on the ranks of the default group; `seed` determines the model's initial values."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model: nn.Module = dist.DistributedDataParallel(Net())
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
        self.optimizer: Any
        if kind == "plain":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        elif kind == "one copy":
            self.optimizer = dist.SharedModelOptimizer(self.model, torch.optim.AdamW, **options)
        else:
            stage: Any = int(kind[-1])
            self.optimizer = dist.ZeroRedundancyOptimizer(self.model, torch.optim.AdamW, stage=stage, **options)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
        self.loader = dist.StatefulLoader(range(64), batch_size=1)
        self.scaler = dist.GradScaler(init_scale=4.0, growth_interval=2)

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "schedule", "loader", "scaler")
        return {name: getattr(self, name) for name in names} | {"plain": {"steps": (1, 2.5), 7: None}}

    def train(self, steps: int) -> None:
        batches = iter(self.loader)
        for step in range(steps):
            next(batches)
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(2, 8, 6, 6, generator=generator)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()

    def contents(self) -> Contents:
        """Returns the state: on rank 0, all of it, as on one rank without sharding; on other ranks, a part of it."""
        found: dict[str, Any] = {}
        module = self.model.module
        if self.kind in ("zero3", "one copy"):
            with self.optimizer.full_parameters():
                found["model"] = _plain(module.state_dict())
        else:
            found["model"] = _plain(module.state_dict())
        if self.kind != "plain":
            self.optimizer.consolidate_state_dict(to=0)
        if self.kind == "plain" or dist.get_rank() == 0:
            found["optimizer"] = _plain(self.optimizer.state_dict())
        for name in ("schedule", "scaler", "loader"):
            found[name] = _plain(getattr(self, name).state_dict())
        return found


def _plain(value: Any) -> Any:
    """Returns tensors as text and bytes, which can be compared after the process has exited."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def save_all_kinds(root: Path) -> dict[str, Contents]:
    """Trains and saves each kind on the ranks of this world."""
    dist.init_process_group()
    saved = {}
    for kind in KINDS:
        loop = Loop(kind, seed=1)
        loop.train(3)
        dist.save(loop.state, root / kind, step=3)
        saved[kind] = loop.contents()
    return saved


def load_all_kinds(root: Path) -> dict[str, tuple[Contents, Any]]:
    """Loads each kind into new objects on the ranks of this world."""
    dist.init_process_group()
    loaded = {}
    for kind in KINDS:
        loop = Loop(kind, seed=2)
        state = loop.state | {"plain": 0}
        assert dist.load(state, root / kind) == 3
        loaded[kind] = loop.contents(), state["plain"]
        loop.train(2)  # everything that was loaded must be usable
    return loaded
