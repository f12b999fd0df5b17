"""A training run on real processes that changes the sharding of its model several times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from divided_training import Layout, batch, built, divided, grouped, trained
from torch import nn
from world import Ranks

import paceline as dist

STEPS = 2  # per layout
LAYOUTS = [
    (Layout(1, 2, 2), False),
    (Layout(2, 1, 2), False),
    (Layout(1, 4, 1), True),
    (Layout(2, 1, 2, zero=2), True),
    (Layout(2, 2, 1, zero=1), False),
]


def go_on(root: Path) -> None:
    dist.init_process_group()
    for turn, (layout, is_asynchronous) in enumerate(LAYOUTS):
        mesh = dist.init_device_mesh("cpu", layout.shape, mesh_dim_names=("dp", "pp", "tp"))
        groups = [mesh.get_group(name) for name in ("dp", "pp", "tp")]
        state = divided(layout, groups, torch.float64)
        if layout.stages == 1 and layout.replicas > 1:
            state["model"] = dist.DistributedDataParallel(state["model"], process_group=groups[0])
        with dist.CheckpointManager(root, every=STEPS, keep=2, asynchronous=is_asynchronous) as manager:
            assert manager.restore(state) == turn * STEPS
            for step in range(turn * STEPS, (turn + 1) * STEPS):
                train(state, layout, step, groups[0].rank())
                manager.save(step + 1, state | {"steps": step + 1})


def train(state: dict[str, Any], layout: Layout, step: int, replica: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    optimizer.zero_grad()
    rows = slice(replica, None, layout.replicas)
    inputs, targets = (each[rows] for each in batch(step, 8))
    if isinstance(model, dist.Pipeline):
        model.step(inputs, targets)
    else:
        nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def test_a_training_changes_its_layout_in_its_course(ranks: type[Ranks], tmp_path: Path) -> None:
    dist.save(trained(0, torch.float64), tmp_path, step=0)
    ranks(4)(go_on, tmp_path)
    model = built(torch.float64)
    state = {"model": model, "optimizer": torch.optim.AdamW(grouped(model)), "steps": 0}
    steps = STEPS * len(LAYOUTS)
    assert dist.load(state, tmp_path) == state["steps"] == steps
    expected = undisturbed(steps)
    for name, value in expected["model"].state_dict().items():
        torch.testing.assert_close(state["model"].state_dict()[name], value, rtol=1e-9, atol=1e-9, msg=name)
    kept, theirs = (each["optimizer"].state_dict()["state"] for each in (state, expected))
    for number, values in theirs.items():
        for key, value in values.items():
            torch.testing.assert_close(kept[number][key], value, rtol=1e-8, atol=1e-9, msg=f"{key} of {number}")


def undisturbed(steps: int) -> dict[str, Any]:
    state = trained(0, torch.float64)
    for step in range(steps):
        train(state, Layout(1, 1, 1), step, 0)
    return state
