"""ZeRO in all stages with float32 master copies of the parameters, on real processes."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from world import Ranks

import paceline as dist


def built() -> nn.Module:
    torch.manual_seed(4)
    layers = [nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)]
    return nn.Sequential(*layers).to(torch.bfloat16)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(8, 12, generator=generator).to(torch.bfloat16)
    targets = torch.randint(0, 3, (8,), generator=generator)
    return nn.functional.cross_entropy(model(inputs).float(), targets)


def averaged_losses(steps: int, clips: bool) -> list[float]:
    """Returns the losses without ZeRO: each rank updates copies of all parameters with the averaged gradients."""
    model = built()
    masters = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.02)
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        for each, master in zip(model.parameters(), masters, strict=True):
            dist.all_reduce(each.grad, dist.ReduceOp.AVG)
            master.grad = each.grad.float()
        if clips:
            nn.utils.clip_grad_norm_(masters, 0.2)
        optimizer.step()
        with torch.no_grad():
            for each, master in zip(model.parameters(), masters, strict=True):
                each.copy_(master)
        losses.append(loss.item())
    return losses


def zero_losses(steps: int, stage: int, offload: Path | None, root: Path, clips: bool) -> list[float]:
    """Runs half of the steps, saves a checkpoint, and runs the other half with a new model in a different stage."""
    losses = []
    model = built()
    for part, chosen in enumerate((stage, 1 + stage % 3)):
        model = copy.deepcopy(built())
        optimizer = dist.ZeroRedundancyOptimizer(
            model, torch.optim.AdamW, stage=chosen, master_dtype=torch.float32, offload=offload, lr=0.02
        )
        state = {"model": model, "optimizer": optimizer}
        if part:
            dist.load(state, root)
        for step in range(part * steps // 2, (part + 1) * steps // 2):
            optimizer.zero_grad()
            loss = loss_of(model, step, dist.get_rank())
            loss.backward()
            if clips:
                optimizer.clip_grad_norm_(0.2)
            optimizer.step()
            losses.append(loss.item())
        dist.save(state, root)
    return losses


def compare_all_stages(root: Path) -> None:
    dist.init_process_group()
    expected = averaged_losses(8, clips=False)
    assert len(set(expected)) == len(expected), "it learns"
    clipped = averaged_losses(8, clips=True)
    assert clipped != expected
    with tempfile.TemporaryDirectory(dir=root) as directory:
        for stage in (1, 2, 3):
            for offload in (None, Path(directory)):
                place = root / f"{stage}-{offload is None}"
                assert zero_losses(8, stage, offload, place, clips=False) == expected, (stage, offload)
        assert zero_losses(8, 2, None, root / "clipped", clips=True) == pytest.approx(clipped, abs=0.01)


def test_all_stages_have_the_bits_of_training_without_zero(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(2)(compare_all_stages, tmp_path)
