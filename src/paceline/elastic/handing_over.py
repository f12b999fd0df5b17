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
                    is_whole = receiver in agreed.followers and self._give_rest(receiver, statuses[receiver].unchecked)
                    if not is_whole:
                        self._send(self._registry.capture(), receiver)
                reach("state.sent")

    def take(self, source: int, mine: Status, follower: Following | None) -> None:
        """Takes over what this worker lacks; `follower` if that is not the whole."""
        with Recorded(EventKind.CHECKPOINT, "receive"):
            if follower is None:
                self._registry.restore(self._receive(source))
            elif not self._take_rest(source, mine.unchecked):
                follower.strays(_OTHER)
                self._registry.restore(self._receive(source))
        reach("state.loaded")

    def _give_rest(self, receiver: int, windows: Sequence[int]) -> bool:
        """Gives what does not follow from the steps; returns whether the receiver has the state then."""
        rest = self._registry.capture_rest(self._is_known)
        self._send([rest, self._digests(windows)], receiver)
        return bool(self._receive(receiver))

    def _take_rest(self, source: int, windows: Sequence[int]) -> bool:
        mine = self._digests(windows)
        rest, theirs = self._receive(source)
        if mine == theirs:
            self._registry.restore_rest(rest)
        self._send(mine == theirs, source)
        return bool(mine == theirs)

    def _is_known(self, param: torch.Tensor) -> bool:
        return self._steps is not None and self._steps.are_noted(param)

    def _digests(self, windows: Sequence[int]) -> list[int]:
        return [self._registry.rolling_digest(window) for window in windows]

    def _send(self, value: object, receiver: int) -> None:
        send_object_list([value], group_dst=receiver, group=self._group)

    def _receive(self, source: int) -> Any:
        box: list[Any] = [None]
        recv_object_list(box, group_src=source, group=self._group)
        return box[0]
