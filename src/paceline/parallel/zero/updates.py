"""What owners have updated, brought to all ranks (ZeRO stages 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.group.buffers import is_plain
from paceline.group.process_group import ProcessGroup
from paceline.parallel.broadcast import byte_views
from paceline.parallel.zero.shards import Shard


def copy_from_owners(shards: Sequence[Shard], group: ProcessGroup) -> None:
    """Copies each owner's values to all ranks."""
    for owner in range(group.size()):
        _copy_from_owner([shard.run(shard.param.data) for shard in shards if shard.owner == owner], owner, group)


def _copy_from_owner(tensors: list[torch.Tensor], owner: int, group: ProcessGroup) -> None:
    """In one call, whatever the types, for all that lie one after the other."""
    if plain := [tensor for tensor in tensors if is_plain(tensor)]:
        group.broadcast(byte_views(plain), owner)
    for tensor in tensors:
        if not is_plain(tensor):
            group.broadcast(tensor.detach(), owner, any_order=True)
