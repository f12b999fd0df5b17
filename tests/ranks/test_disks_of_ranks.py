"""Checkpoints on disks that are not shared between hosts, on real processes, while training continues."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from world import Ranks

import paceline as dist


def save_and_swap_disks(root: Path) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Linear(300, 200)
    optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with dist.CheckpointManager(root / f"host{rank}", every=1, keep=2, shared=False) as manager:
        assert manager.restore(state) is None
        for step in (1, 2, 3):
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            manager.save(step, state)
            last = model.weight.detach().clone()
    other = nn.Linear(300, 200)
    resumed = {"model": other, "optimizer": dist.ZeroRedundancyOptimizer(other, torch.optim.AdamW, lr=0.2)}
    with dist.CheckpointManager(root / f"host{(rank + 1) % dist.get_world_size()}", shared=False) as manager:
        assert manager.restore(resumed) == 3
    assert torch.equal(other.weight, last)
    for each, kept in ((model, optimizer), (other, resumed["optimizer"])):
        kept.zero_grad()
        each(torch.ones(1, 300)).sum().backward()
        kept.step()
    assert torch.equal(other.weight, model.weight)


def test_ranks_get_from_each_other_what_their_disks_lack(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(2)(save_and_swap_disks, tmp_path)
    assert len([*(tmp_path / "host1").glob("step_*")]) == 2
