"""Copies tensors of any type and layout from one rank to all."""

from __future__ import annotations

import torch

from paceline.group.buffers import is_plain
from paceline.group.process_group import ProcessGroup


def by_device(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the tensors of each device, since a call takes tensors of one device."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())


def byte_views(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the memory of contiguous tensors as uint8, so that several dtypes travel in one call."""
    return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]


def broadcast_tensors(tensors: list[torch.Tensor], group: ProcessGroup, root: int = 0) -> None:
    """Copies the root's values to all ranks, whatever the dtypes and layouts."""
    plain = [tensor for tensor in tensors if is_plain(tensor)]
    kept = {id(tensor) for tensor in plain}
    for together in by_device(plain):
        group.broadcast(byte_views(together), root)
    for tensor in tensors:
        if id(tensor) not in kept:
            group.broadcast(tensor.detach(), root)
