"""State dicts that torch.save and torch.distributed.checkpoint write."""

from __future__ import annotations

import torch
from torch import nn


def trained() -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "digits"}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return one == other
