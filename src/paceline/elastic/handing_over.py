"""How the members of a view that have the state give it, or a part of it, to those that lack it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.elastic.agreement import Agreement, Status
from paceline.elastic.failpoints import reach
from paceline.elastic.joining.following import Following
from paceline.elastic.joining.steps import Steps
from paceline.elastic.registry import Registry
from paceline.group.objects.messages import recv_object_list, send_object_list
from paceline.group.process_group import ProcessGroup
from paceline.record.names import EventKind
from paceline.record.spans import Recorded

_OTHER = "its parameters, or what its optimizer keeps, differed from those of the others when it entered the view"


class HandingOver:
    """What this worker gives and gets when it enters a view.

    Args:
        registry: the state.
        group: the process group of the view.
        steps: of the usual loop, in which a worker may have followed them, and lacks only the rest.
    """

    def __init__(self, registry: Registry, group: ProcessGroup, steps: Steps | None) -> None:
        self._registry, self._group, self._steps = registry, group, steps

    def give(self, agreed: Agreement, statuses: Sequence[Status]) -> None:
        """Gives the others what they lack, as far as this worker is to."""
        for receiver, source in enumerate(agreed.source):
            if source == self._group.rank():
                reach("state.before_sending")
                with Recorded(EventKind.CHECKPOINT, "send"):
                    lacks_all = receiver not in agreed.followers or self._differs(statuses[receiver])
                    state = self._registry.capture() if lacks_all else self._registry.capture_rest(self._is_known)
                    send_object_list([lacks_all, state], group_dst=receiver, group=self._group)
                reach("state.sent")

    def take(self, source: int, follower: Following | None) -> None:
        """Takes over what this worker lacks; `follower` if that may not be the whole."""
        with Recorded(EventKind.CHECKPOINT, "receive"):
            box: list[Any] = [None, None]
            recv_object_list(box, group_src=source, group=self._group)
            lacks_all, state = box
            if not lacks_all:
                self._registry.restore_rest(state)
            else:
                if follower is not None:
                    follower.strays(_OTHER)
                self._registry.restore(state)
        reach("state.loaded")

    def _differs(self, follower: Status) -> bool:
        return any(self._registry.rolling_digest(window) != digest for window, digest in follower.parts)

    def _is_known(self, param: torch.Tensor) -> bool:
        return self._steps is not None and self._steps.are_noted(param)
