"""Sums in the order of the pairwise tree over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from paceline import _core
from paceline.engine.channel import Call
from paceline.group.buffers import Buffers, count_elements, dtype_code
from paceline.group.messages import MessagingGroup
from paceline.group.reduce_op import ReduceOp
from paceline.schedule.steps import Operation

_ROUNDED_ONCE = (torch.float16, torch.bfloat16)  # the core adds them in float32


class TreeSummingGroup(MessagingGroup):
    """A group that can add its ranks' tensors in an order which does not depend on the engine."""

    def sums_as_tree(self, tensor: torch.Tensor) -> bool:
        """Returns whether `sum_as_tree` takes a tensor like this one; the same on all ranks."""
        # The core follows the tree on one host. Schedules add in their own order, and so do the other engines.
        return isinstance(self._channel, _core.HostGroup) and tensor.is_cpu and tensor.dtype not in _ROUNDED_ONCE

    def sum_as_tree(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Adds up the ranks' `inputs` into `outputs` in the order ((0 1) (2 3)) ((4 5) ...); every sum is rounded.

        Args:
            outputs: tensors with the shapes and the dtype of the inputs: the same tensors, or others in memory of their
                own.
            inputs: tensors of one dtype that `sums_as_tree`, which otherwise do not change.
        """
        code = dtype_code([*inputs, *outputs], "sum_as_tree")
        buffers = Buffers()
        in_place = all(map(is_, inputs, outputs))
        read = [] if in_place else [buffers.read(inputs)]
        written = [buffers.write(outputs)]
        count = count_elements(inputs)
        call = Call(Operation.ALL_REDUCE, code, ReduceOp.SUM, -1, count, self.timeout_ns, read, written)
        self._run((call, buffers), False)
