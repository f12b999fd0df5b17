"""Averages outer gradients over those ranks that take part in an exchange."""

from __future__ import annotations

import torch

from paceline.group.process_group import ProcessGroup
from paceline.group.work import Work


class Averaging:
    """Averages tensors in place, of which a rank that takes no part gives zeros.

    The first tensor of a fragment is the outer gradient; others, such as the values of buffers, are sent as they are.
    """

    def begin(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor]) -> list[Work]:
        """Begins to add up a fragment's tensors over the ranks of `group`."""
        works = [group.all_reduce(tensor, async_op=True) for tensor in tensors if tensor.numel()]
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
