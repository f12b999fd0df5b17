"""What an owner has updated, brought to all ranks (ZeRO stages 1 and 2)."""

from __future__ import annotations

import torch

from paceline.group.buffers import is_plain
from paceline.group.process_group import ProcessGroup
from paceline.parallel.agreement import byte_views


def copy_from_owner(tensors: list[torch.Tensor], owner: int, group: ProcessGroup) -> None:
    """Copies the owner's values to all ranks: in one call, whatever the types, for all that lie one after the other."""
    if plain := [tensor for tensor in tensors if is_plain(tensor)]:
        group.broadcast(byte_views(plain), owner)
    for tensor in tensors:
        if not is_plain(tensor):
            group.broadcast(tensor.detach(), owner, any_order=True)
