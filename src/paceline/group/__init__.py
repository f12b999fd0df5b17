"""Process groups, and the collectives that users call on them.

May use: `engine` and below. Start reading at `collectives.py` and `rooted.py`, the public calls; they become calls of
the engine in `planning.py`, `process_group.py` and `running.py`. `persistent.py` has calls that are prepared once.
`init.py` makes and ends groups, `default.py` holds the default group, and `objects/` sends Python objects.
`paceline.group.WORLD` is the default group, as in torch.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.group.process_group import ProcessGroup

WORLD: ProcessGroup | None  # looked up again at each access


def __getattr__(name: str) -> object:
    if name == "WORLD":
        from paceline.group.default import GroupMember

        return GroupMember.WORLD
    raise AttributeError(f"module 'paceline.group' has no attribute {name!r}")
