"""Compares sharded optimizers and resumed training on a device with unsharded and uninterrupted training."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import paceline as dist
from gpu_cases.session import Session, Setting, session
from gpu_cases.training import STEPS, Network, batch, largest_difference

STAGES = (1, 2, 3)


def _losses(
    here: Session, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, first: int, last: int
) -> list[float]:
    told = []
    for step in range(first, last):
        optimizer.zero_grad()
        inputs, targets = batch(step, here.rank)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        told.append(loss.detach())
    return [loss.item() for loss in told]


def zero(setting: Setting, stage: int) -> dict[str, object]:
    """Trains with a stage of ZeRO and with torch's DDP and AdamW, and compares losses and consolidated states."""
    with session(setting) as here:
        torch.manual_seed(0)
        model = Network().to(here.device)
        optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-3)
        found = _losses(here, model, optimizer, here.device, 0, STEPS)
        torch.manual_seed(0)
        is_cuda = here.reference_device.type == "cuda"
        reference = nn.parallel.DistributedDataParallel(
            Network().to(here.reference_device), device_ids=[here.reference_device.index] if is_cuda else None
        )
        other = torch.optim.AdamW(reference.parameters(), lr=1e-3)
        wanted = _losses(here, reference, other, here.reference_device, 0, STEPS)
        difference = largest_difference(f"rank {here.rank}: stage {stage}", found, wanted, 1e-4)
        optimizer.consolidate_state_dict(to=0)
        if here.rank == 0:
            mine, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
            if mine.keys() != theirs.keys():
                raise AssertionError(f"the consolidated state has {sorted(mine)} instead of {sorted(theirs)}")
            for at, state in theirs.items():
                if not torch.allclose(mine[at]["exp_avg"].cpu(), state["exp_avg"].cpu(), rtol=1e-2, atol=1e-5):
                    raise AssertionError(f"exp_avg of parameter {at} differs from the one that is not sharded")
        dist.barrier()
    return {"losses": len(found), "largest difference": difference}


def _trained(here: Session, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    if stage:
        model = Network().to(here.device)
        return model, dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, stage=stage, lr=1e-3)
    ids = None if here.device.type == "cpu" else [here.device.index]
    wrapped = dist.DistributedDataParallel(Network().to(here.device), device_ids=ids)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3)


def checkpoints(setting: Setting, stage: int) -> dict[str, object]:
    """Saves during training, loads into new objects, and requires the same losses from then on."""
    folder = Path(setting.folder, f"checkpoints-{stage}")
    half = STEPS // 2
    with session(setting, theirs=False) as here:
        model, optimizer = _trained(here, stage)
        _losses(here, model, optimizer, here.device, 0, half)
        with dist.CheckpointManager(folder) as manager:
            manager.save(half, {"model": model, "optimizer": optimizer}, force=True)
            wanted = _losses(here, model, optimizer, here.device, half, STEPS)
        again, other = _trained(here, stage)
        with dist.CheckpointManager(folder) as manager:
            step = manager.restore({"model": again, "optimizer": other})
        if step != half:
            raise AssertionError(f"the checkpoint that was restored is of step {step} instead of {half}")
        found = _losses(here, again, other, here.device, half, STEPS)
        return {"largest difference": largest_difference(f"rank {here.rank}: restored", found, wanted, 0.0)}


def map_location(setting: Setting) -> None:
    """Saves on one rank with torch.save, and loads on each rank with `map_location`, as in PyTorch's tutorial."""
    path = Path(setting.folder, "model.pt")
    with session(setting, theirs=False) as here:
        model, _ = _trained(here, 0)
        if here.rank == 0:
            torch.save(model.state_dict(), path)
        dist.barrier()
        loaded = torch.load(path, map_location=here.device, weights_only=True)
        if any(tensor.device != here.device for tensor in loaded.values()):
            raise AssertionError(f"map_location={here.device} loaded to {loaded['module.last.bias'].device}")
        model.load_state_dict(loaded)
        dist.barrier()
