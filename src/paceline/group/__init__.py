"""Process groups and the collectives as users call them.

May use: `engine` and below. Start reading at `process_group.py`; the public calls are in `collectives.py`, what makes
and ends groups is in `default.py`. `paceline.group.WORLD` is the default group, as in torch.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.group.process_group import ProcessGroup

WORLD: ProcessGroup | None  # looked up anew each time


def __getattr__(name: str) -> object:
    if name == "WORLD":
        from paceline.group.default import GroupMember

        return GroupMember.WORLD
    raise AttributeError(f"module 'paceline.group' has no attribute {name!r}")
