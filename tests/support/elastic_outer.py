"""A training program with DiLoCo for tests of elastic jobs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from local_reference import RATE, build, inner_step

import paceline as dist

_WAITING_S = 0.05


def train(steps: int, delay: int = 0, complete: int = 0, step_s: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Trains; returns the parameters, the outer parameters, and the changes of membership.

    Args:
        steps: The number of inner steps.
        delay: The number of inner steps after which results are used.
        complete: The number of workers below which steps are slow.
        step_s: The minimum duration of a step in seconds.
        seed: The seed of the model.
    """
    dist.init_process_group(elastic=True)
    model = build(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=RATE)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = dist.DiLoCo(model, inner, outer, every=4, fragments=2, delay=delay)
    views: list[list[Any]] = []
    state = dist.ElasticState(diloco, on_view=lambda change: views.append([change.workers, [*change.came]]))
    slot = int(os.environ["LOCAL_RANK"])
    joined_at = -1
    for _ in state.epochs(1):
        joined_at = diloco.steps
        while diloco.steps < steps or dist.get_world_size() < complete:
            inner_step(model, inner, slot, diloco.steps)
            diloco.step()
            time.sleep(_WAITING_S if dist.get_world_size() < complete else step_s)
        diloco.finish()
    return {
        "digest": state.digest(),
        "parameters": [param.tolist() for param in model.parameters()],
        "outer": [copy.tolist() for _, copy in diloco.outer_module.pairs()],
        "views": views,
        "joined_at": joined_at,
    }


def refused() -> None:
    """Constructs states with objects that they must reject."""
    dist.init_process_group(elastic=True)
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    with pytest.raises(ValueError, match="grace_s=1.0"):
        dist.ElasticState(dist.LocalSGD(model, inner, grace_s=1.0))
    diloco = dist.LocalSGD(model, inner)
    for optimizer in (inner, diloco.outer):
        with pytest.raises(ValueError, match="an optimizer of DiLoCo"):
            dist.ElasticState(diloco, optimizer=optimizer)
    with pytest.raises(TypeError, match="a loop of DiLoCo"):
        dist.ElasticState(diloco).skip_batch()
