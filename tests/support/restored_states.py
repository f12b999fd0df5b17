"""A small state that contains its step, and a check that a restored state is from a given step."""

from __future__ import annotations

import torch


def state_of(step: int) -> dict[str, object]:
    return {"value": step, "tensor": torch.full((5,), float(step))}


def require_step(state: dict[str, object], step: int) -> None:
    assert state["value"] == step
    assert isinstance(state["tensor"], torch.Tensor)
    assert state["tensor"].tolist() == [float(step)] * 5
