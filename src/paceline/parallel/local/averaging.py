"""Averages outer gradients over those ranks that take part in an exchange."""

from __future__ import annotations

import torch

from paceline.group.process_group import ProcessGroup


class Averaging:
    """Averages tensors in place, of which a rank that takes no part gives zeros."""

    def average(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor], parts: int) -> None:
        """Averages a fragment's tensors over `parts` ranks, all of `group` taking part in the call.

        The first tensor is the outer gradient; others, such as the values of buffers, are sent as they are.
        """
        for tensor in tensors:
            if tensor.numel():
                group.all_reduce(tensor)
                tensor.div_(parts)
