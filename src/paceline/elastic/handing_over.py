"""How the members of a view that have the state give it to those that lack it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.elastic.failpoints import reach
from paceline.elastic.registry import Registry
from paceline.group.objects.messages import recv_object_list, send_object_list
from paceline.group.process_group import ProcessGroup
from paceline.record.names import EventKind
from paceline.record.spans import Recorded


def hand_over(registry: Registry, sources: Sequence[int | None], group: ProcessGroup) -> bool:
    """Returns whether this rank has been given the state.

    Args:
        registry: the state of this rank.
        sources: for each rank that lacks the state, the rank that gives it; None for the others.
        group: the process group of the view.
    """
    rank = group.rank()
    for receiver, source in enumerate(sources):
        if source == rank:
            reach("state.before_sending")
            with Recorded(EventKind.CHECKPOINT, "send"):
                send_object_list([registry.capture()], group_dst=receiver, group=group)
            reach("state.sent")
    source = sources[rank]
    if source is None:
        return False
    box: list[Any] = [None]
    with Recorded(EventKind.CHECKPOINT, "receive"):
        recv_object_list(box, group_src=source, group=group)
        registry.restore(box[0])
    reach("state.loaded")
    return True
