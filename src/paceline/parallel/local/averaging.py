"""Averages outer gradients over those ranks that take part in an exchange."""

from __future__ import annotations

import torch

from paceline.group.process_group import ProcessGroup
from paceline.group.wire import Wire, WireKind
from paceline.group.work import Work


class Averaging:
    """Averages tensors in place, of which a rank that takes no part gives zeros.

    The first tensor of a fragment is the outer gradient. It is rounded between hosts if there is a `wire`, and what the
    rounding has lost is added in the fragment's next exchange. Others, such as the values of buffers, are sent as they
    are.
    """

    def __init__(self, wire: WireKind | None) -> None:
        self._kind = wire
        self._wires: dict[int, Wire] = {}

    def begin(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor]) -> list[Work]:
        """Begins to add up a fragment's tensors over the ranks of `group`."""
        gradient, *others = tensors
        works = [group.all_reduce(gradient, async_op=True, wire=self._wire_of(fragment))]
        works += [group.all_reduce(tensor, async_op=True) for tensor in others]
        return [work for work in works if work is not None]

    def end(self, works: list[Work], tensors: list[torch.Tensor], parts: int) -> None:
        """Waits for sums that `begin` began, and divides them by the number of ranks that took part."""
        for work in works:
            work.wait()
        for tensor in tensors:
            tensor.div_(parts)

    def average(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor], parts: int) -> None:
        """Averages a fragment's tensors over `parts` ranks of `group`, all of which call this."""
        self.end(self.begin(group, fragment, tensors), tensors, parts)

    def _wire_of(self, fragment: int) -> Wire | None:
        if self._kind is None:
            return None
        return self._wires.setdefault(fragment, Wire(self._kind))
