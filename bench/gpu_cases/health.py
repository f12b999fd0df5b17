"""Programs that check that the machine and the two libraries work."""

from __future__ import annotations

import torch
import torch.distributed as torch_dist

import paceline as dist
from gpu_cases.session import Setting, session


def ours(setting: Setting) -> None:
    """Forms Paceline's group, reduces a tensor and leaves."""
    with session(setting, theirs=False) as here:
        tensor = torch.full((1 << 20,), here.rank + 1.0, device=here.device)
        dist.all_reduce(tensor)
        _require_sum(tensor, here.size)


def theirs(setting: Setting) -> None:
    """Does the same with torch.distributed; if this fails, Paceline is not the cause."""
    with session(setting, ours=False) as here:
        tensor = torch.full((1 << 20,), here.rank + 1.0, device=here.reference_device)
        torch_dist.all_reduce(tensor)
        _require_sum(tensor, here.size)


def _require_sum(tensor: torch.Tensor, size: int) -> None:
    wanted = size * (size + 1) / 2
    if not tensor.eq(wanted).all().item():
        raise AssertionError(f"the sum is {tensor[0].item()} instead of {wanted}")
