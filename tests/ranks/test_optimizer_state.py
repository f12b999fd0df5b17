"""Exchange of states between a partitioned optimizer and a single-process optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline as dist

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, object]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.encoder(self.embed(x)) @ self.embed.weight.t()).mean(1)  # the embedding is used twice


def build(kind: str) -> nn.Module:
    torch.manual_seed(dist.get_rank())  # wrapping must make them the same
    if kind == "transformer":
        return Transformer()
    if kind == "cnn":
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 20)).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 20))


def batch(kind: str, step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    target = torch.randint(0, 20, (6,), generator=generator)
    if kind == "transformer":
        return torch.randint(0, 20, (6, 5), generator=generator), target
    return torch.randn((6, 1, 8, 8) if kind == "cnn" else (6, 8), generator=generator), target


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str = "mlp", steps: int = 20, first: int = 0
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x, target = batch(kind, step)
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def unsharded(model: nn.Module, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = dist.DistributedDataParallel(model)
    optimizer_class, options = OPTIMIZERS[name]
    return wrapped, optimizer_class(wrapped.parameters(), **options)


def require_close(mine: object, other: object) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def state_dicts() -> None:
    dist.init_process_group()
    for stage in (1, 2, 3):
        for name, (optimizer_class, options) in OPTIMIZERS.items():
            reference, optimizer = unsharded(build("mlp"), name)
            train(reference, optimizer, steps=3)
            model = build("mlp")
            sharded = dist.ZeroRedundancyOptimizer(model, optimizer_class, stage=stage, **options)
            with pytest.raises(
                RuntimeError, match=r"rank \d: the optimizer's state is still sharded. Call consolidate_state_dict"
            ):
                sharded.state_dict()
            train(model, sharded, steps=3)
            sharded.consolidate_state_dict(to=1)
            if dist.get_rank() == 1:
                torch.testing.assert_close(sharded.state_dict(), optimizer.state_dict())
                again = optimizer_class(reference.parameters(), **options)
                again.load_state_dict(sharded.state_dict())

            # The reverse: a new partitioned optimizer continues with the state of the unsharded optimizer.
            with sharded.full_parameters():
                fresh_model = copy.deepcopy(reference.module)
            fresh = dist.ZeroRedundancyOptimizer(fresh_model, optimizer_class, stage=stage, lr=123.0)
            fresh.load_state_dict(optimizer.state_dict())
            assert fresh.param_groups[0]["lr"] == options["lr"]
            require_close(train(fresh_model, fresh, first=3), train(reference, optimizer, first=3))


def test_states_are_exchanged_with_the_unsharded_optimizer(ranks):
    ranks(2)(state_dicts)
