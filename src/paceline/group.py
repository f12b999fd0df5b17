"""Public module with `paceline.group.WORLD`, the default group, as in torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.comm.group.default import GroupMember

if TYPE_CHECKING:
    from paceline.comm.group.process_group import ProcessGroup

WORLD: ProcessGroup | None  # resolved by `__getattr__` on each access


def __getattr__(name: str) -> object:
    if name == "WORLD":
        return GroupMember.WORLD
    raise AttributeError(f"module 'paceline.group' has no attribute {name!r}")
