"""The shortest way of a call: synchronous, on plain tensors on the CPU.

Most calls are of that kind, and where tensors are small, checking and describing them takes longer than moving them. So
what every call must check is checked here without functions of Python for each tensor, and the engine gets addresses.
Whatever is unusual about a call, and whatever is wrong with it, is left to `planning.py` and `RunningGroup._run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.autograd import profiler

from paceline.engine.channel import Call, Outcome
from paceline.engine.codes import ITEM_SIZES, NO_REDUCTION
from paceline.errors import CollectiveError
from paceline.group.buffers import Buffers, address_of
from paceline.group.reduce_op import ReduceOp
from paceline.group.reductions import QUICK_CODES
from paceline.group.tree_sums import TreeSummingGroup
from paceline.group.writes import count_writes
from paceline.schedule.steps import Operation

_STRIDED = torch.strided
_NONE = object()  # stands for the reduction of an operation that has none


class PlainCallsGroup(TreeSummingGroup):
    """A group that makes calls on plain tensors by the shortest way."""

    def all_reduce_as_it_is(self, tensor: object, op: object) -> Outcome | Literal[False] | None:
        """Does what a channel's `all_reduce_tensor` does, for all channels and with every version of PyTorch."""
        if not isinstance(tensor, torch.Tensor) or not isinstance(op, ReduceOp):
            return False
        quick = QUICK_CODES.get(tensor.dtype)
        if quick is None or not tensor.is_cpu or tensor.layout is not _STRIDED:
            return False
        code, reduce_code = quick[0], quick[1][op]
        if reduce_code < 0 or not tensor.is_contiguous() or tensor.is_neg():
            return False
        if self._closed:
            raise self.closed_error()
        count_writes((tensor,))
        return self._channel.all_reduce(address_of(tensor), tensor.numel(), code, reduce_code, self.timeout_ns)

    def make_plainly(
        self,
        operation: Operation,
        dtype: torch.dtype,
        count: int,
        inputs: Sequence[object],
        outputs: Sequence[object],
        parts: tuple[int, int],
        *,
        op: object = _NONE,
        root: int = -1,
        are_whole: bool = False,
    ) -> bool:
        """Makes the call and returns True if its tensors are plain; otherwise does nothing and returns False.

        Args:
            operation: any but all_reduce and broadcast, whose ways are shorter still.
            dtype: the type of all tensors.
            count: the number of elements of a part.
            inputs, outputs: the tensors.
            parts: how many parts there must be among the inputs, and among the outputs.
            op: the reduction, if the operation has one.
            root: the group rank of the root, if the operation has one.
            are_whole: all parts of the inputs are in one tensor, and so are those of the outputs; otherwise each part
                is a tensor.
        """
        quick = None if profiler._is_profiler_enabled else QUICK_CODES.get(dtype)
        if quick is None:
            return False
        reduce_code = NO_REDUCTION
        if op is not _NONE:
            reduce_code = quick[1][op] if isinstance(op, ReduceOp) else -1
            if reduce_code < 0:
                return False
        nbytes = count * ITEM_SIZES[quick[0]]
        read = _addresses(inputs, dtype, nbytes, parts[0], are_whole)
        written = _addresses(outputs, dtype, nbytes, parts[1], are_whole)
        if read is None or written is None:
            return False
        if operation is not Operation.REDUCE or root == self._rank:
            count_writes(outputs)
        self._run_equal(operation, quick[0], reduce_code, root, count, nbytes, read, written, (*inputs, *outputs))
        return True

    def gather_plainly(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Makes an all_gather into one tensor; see `make_plainly`."""
        parts = (1, self.size())
        operation = Operation.ALL_GATHER
        return self.make_plainly(operation, part.dtype, part.numel(), (part,), (whole,), parts, are_whole=True)

    def reduce_scatter_plainly(self, part: torch.Tensor, whole: torch.Tensor, op: object) -> bool:
        """Makes a reduce_scatter of one tensor; see `make_plainly`."""
        parts = (self.size(), 1)
        operation = Operation.REDUCE_SCATTER
        return self.make_plainly(operation, part.dtype, part.numel(), (whole,), (part,), parts, op=op, are_whole=True)

    def exchange_plainly(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Makes an all_to_all of equal parts of two tensors; see `make_plainly`."""
        ranks = self.size()
        if input.dim() == 0 or output.dim() == 0 or input.shape[0] % ranks or output.shape[0] % ranks:
            return False
        count = input.numel() // ranks
        operation = Operation.ALL_TO_ALL
        return self.make_plainly(operation, input.dtype, count, (input,), (output,), (ranks, ranks), are_whole=True)

    def barrier_plainly(self) -> bool:
        """Waits for all ranks and returns True unless a profiler watches; then does nothing and returns False."""
        if profiler._is_profiler_enabled:
            return False
        self._run_equal(Operation.BARRIER, 0, NO_REDUCTION, -1, 0, 0, [], [], ())
        return True

    def _run_equal(
        self,
        operation: Operation,
        code: int,
        reduce_code: int,
        root: int,
        count: int,
        nbytes: int,
        read: list[int],
        written: list[int],
        kept: Sequence[object],
    ) -> None:
        if self._closed:
            raise self.closed_error()
        limit_ns = self.timeout_ns
        outcome = self._channel.run_equal(operation, code, reduce_code, root, count, limit_ns, read, written)
        if outcome is not None:
            inputs, outputs = ([[address, nbytes] for address in addresses] for addresses in (read, written))
            call = Call(operation, code, reduce_code, root, count, limit_ns, inputs, outputs)
            raise self._abandon(outcome, call, kept)

    def run_on_cpu(self, call: Call, kept: Sequence[torch.Tensor]) -> None:
        """Makes a call that writes to `kept`, tensors on the CPU that its caller has checked; no profiler may watch."""
        if self._closed:
            raise self.closed_error()
        count_writes(kept)
        outcome = self._channel.run(call)
        if outcome is not None:
            raise self._abandon(outcome, call, kept)

    def _abandon(self, outcome: Outcome, call: Call, kept: Sequence[object]) -> CollectiveError:
        buffers = Buffers()
        buffers.kept += [each for each in kept if isinstance(each, torch.Tensor)]
        return self.abandon(outcome, (call, buffers))


def _addresses(
    tensors: Sequence[object], dtype: torch.dtype, nbytes: int, parts: int, are_whole: bool
) -> list[int] | None:
    """Returns the addresses of the parts, each of which has `nbytes` bytes; None if one is not plain or does not fit.

    The dtype is not complex, so that no tensor is a conjugate view.
    """
    if not isinstance(tensors, (list, tuple)) or len(tensors) != (1 if are_whole else parts):
        return None
    found: list[int] = []
    wanted = nbytes * parts if are_whole else nbytes
    for tensor in tensors:
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype is not dtype
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or tensor.nbytes != wanted
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        found.append(address_of(tensor))
    return [found[0] + part * nbytes for part in range(parts)] if are_whole else found
