"""A process group: its ranks, and the collectives on lists of tensors which the public calls use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.durations import Timeout
from paceline.engine.channel import Call
from paceline.engine.codes import DTYPE_CODES, NO_REDUCTION
from paceline.group.arguments import require_root
from paceline.group.buffers import Buffers, Tensors, address_of, as_list, is_plain
from paceline.group.exchange import all_gather_pieces, as_memory, as_tensor, room_for
from paceline.group.explaining import explain_choice
from paceline.group.options import Options, are_options, one_list, reduction_of, time_limit
from paceline.group.plain_calls import PlainCallsGroup
from paceline.group.planning import (
    plan_all_gather,
    plan_all_reduce,
    plan_all_to_all,
    plan_barrier,
    plan_broadcast,
    plan_gather,
    plan_reduce,
    plan_reduce_scatter,
    plan_scatter,
)
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.sparse import all_reduce_sparse
from paceline.group.torch_methods import TorchMethods
from paceline.group.wire import WireKind, WireLike, with_wire
from paceline.group.work import Work
from paceline.group.writes import count_writes
from paceline.schedule.steps import Operation

_STRIDED = torch.strided


class ProcessGroup(PlainCallsGroup, TorchMethods):
    """The ranks that take part in a collective. `init_process_group` and `new_group` make groups.

    Ranks are numbered 0 to size - 1 within the group; `ranks[r]` is rank r's rank in the default group. Methods that
    torch.distributed's groups also have accept torch's option objects. Called without `async_op` they return a `Work`,
    as torch's do: sends and receives return it at once, all others when the call is complete.

    Attributes:
        wire: what sums of floats are rounded to between hosts if a call does not say so itself; None if they are exact.
    """

    wire: WireKind | None = None

    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
        any_order: bool = False,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place; the argument `any_order` is that of `Buffers`."""
        if timeout is None and wire is None and not async_op and not profiler._is_profiler_enabled:
            # The path of most calls, on which each line counts.
            try:
                outcome = self._channel.all_reduce_tensor(tensors, op, self.timeout_ns)
            except TypeError:  # the core takes no None
                as_list(tensors, "all_reduce")
                raise
            if outcome is False:
                outcome = self.all_reduce_as_it_is(tensors, op)
            if outcome is None:
                return None
            if outcome is not False:
                assert isinstance(tensors, torch.Tensor) and isinstance(op, ReduceOp)
                code = DTYPE_CODES[tensors.dtype]
                raise self._error(outcome, (0, Operation.ALL_REDUCE, code, op, -1, tensors.numel()))
        listed = as_list(tensors, "all_reduce")
        if wire is None and len(listed) == 1 and listed[0].layout is torch.sparse_coo:
            return all_reduce_sparse(self, listed[0], reduction_of(op), async_op, timeout)
        plan = plan_all_reduce(listed, op, self.limit_ns(timeout), any_order)
        return self._run(plan if wire is None else with_wire(plan, wire, self.size()), async_op)

    def all_reduce_memory(
        self,
        pieces: list[int],
        kept: Sequence[torch.Tensor],
        dtype: int,
        count: int,
        op: ReduceOp,
        async_op: bool = False,
        wire: WireLike = None,
    ) -> Work | None:
        """Does what `all_reduce` does, for `count` elements at the addresses and numbers of bytes in `pieces`.

        It is for callers that make the same call many times and have checked their tensors, which are in `kept` and on
        one device, once.
        """
        call = Call(Operation.ALL_REDUCE, dtype, op, -1, count, self.timeout_ns, [], [pieces])
        if wire is None and not async_op and kept and kept[0].is_cpu and not profiler._is_profiler_enabled:
            self.run_on_cpu(call, kept)
            return None
        buffers = Buffers()
        buffers.kept += kept
        buffers.written += kept
        return self._run(with_wire((call, buffers), wire, self.size()), async_op)

    def reduce_scatter_memory(
        self,
        inputs: list[list[int]],
        outputs: list[list[int]],
        kept: list[torch.Tensor],
        dtype: int,
        count: int,
        op: ReduceOp,
        update: _core.Update | None = None,
    ) -> None:
        """Is to `reduce_scatter` what `all_reduce_memory` is to `all_reduce`; each rank receives `count` elements.

        A group that `applies_updates` may be given an `update`, and then needs no output.
        """
        buffers = Buffers()
        buffers.kept += kept
        call = Call(Operation.REDUCE_SCATTER, dtype, op, -1, count, self.timeout_ns, inputs, outputs, update=update)
        self._run((call, buffers), False)

    def broadcast(
        self,
        tensors: Tensors,
        root: int | Options = 0,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
        any_order: bool = False,
    ) -> Work | None:
        """Copies the root's `tensors` to all ranks."""
        if are_options(root):
            return self.broadcast(tensors, root.rootRank, True, time_limit(root))
        require_root(self, root, "broadcast")
        if async_op is False and timeout is None and isinstance(tensors, torch.Tensor):
            code = None if profiler._is_profiler_enabled else DTYPE_CODES.get(tensors.dtype)
            if code is not None and tensors.is_cpu and tensors.layout is _STRIDED and is_plain(tensors):
                if self._closed:
                    raise self.closed_error()
                count = tensors.numel()
                if root != self._rank:
                    count_writes((tensors,))
                outcome = self._channel.broadcast(address_of(tensors), count, code, root, self.timeout_ns)
                if outcome is not None:
                    raise self._error(outcome, (0, Operation.BROADCAST, code, NO_REDUCTION, root, count))
                return None
        return self._run(plan_broadcast(tensors, root, self.limit_ns(timeout), any_order), async_op)

    def reduce(
        self,
        tensors: Tensors,
        root: int | Options = 0,
        op: Reduction = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks into those of the root; the tensors of other ranks do not change."""
        if are_options(root):
            return self.reduce(tensors, root.rootRank, reduction_of(root), True, time_limit(root))
        require_root(self, root, "reduce")
        if (
            async_op is False
            and timeout is None
            and isinstance(tensors, torch.Tensor)
            and self.make_plainly(
                Operation.REDUCE, tensors.dtype, tensors.numel(), (), (tensors,), (0, 1), op=op, root=root
            )
        ):
            return None
        return self._run(plan_reduce(self, tensors, root, op, self.limit_ns(timeout)), async_op)

    def all_gather(
        self,
        outputs: Sequence[Tensors],
        tensors: Tensors,
        async_op: bool = False,
        timeout: Timeout | None = None,
        wire: WireLike = None,
    ) -> Work | None:
        """Copies every rank's `tensors` to all ranks; `outputs[r]` receives those of rank r."""
        if (
            async_op is False
            and timeout is None
            and wire is None
            and isinstance(tensors, torch.Tensor)
            and self.make_plainly(
                Operation.ALL_GATHER, tensors.dtype, tensors.numel(), (tensors,), outputs, (1, self.size())
            )
        ):
            return None
        plan = plan_all_gather(self, outputs, tensors, self.limit_ns(timeout))
        return self._run(with_wire(plan, wire, self.size()), async_op)

    def gather(
        self,
        outputs: Sequence[Tensors] | None,
        tensors: Tensors,
        root: int | Options,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies every rank's `tensors` to the root; `outputs` is None or empty on other ranks."""
        if are_options(root):
            outputs = one_list(outputs, "gather") if outputs else None
            return self.gather(outputs, tensors, root.rootRank, True, time_limit(root))
        require_root(self, root, "gather")
        if async_op is False and timeout is None and isinstance(tensors, torch.Tensor):
            parts = (1, self.size() if self._rank == root else 0)
            if self.make_plainly(
                Operation.GATHER, tensors.dtype, tensors.numel(), (tensors,), outputs or (), parts, root=root
            ):
                return None
        return self._run(plan_gather(self, outputs, tensors, root, self.limit_ns(timeout)), async_op)

    def reduce_scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors],
        op: Reduction | Options = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces the ranks' `inputs[r]` into the `output` of rank r."""
        if are_options(op):
            inputs = one_list(inputs, "reduce_scatter")
            return self.reduce_scatter(output, inputs, reduction_of(op), True, time_limit(op))
        if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) and self.size() > 1:
            inputs = one_list(inputs, "reduce_scatter")  # torch's form, without options
        if (
            async_op is False
            and timeout is None
            and wire is None
            and isinstance(output, torch.Tensor)
            and self.make_plainly(
                Operation.REDUCE_SCATTER, output.dtype, output.numel(), inputs, (output,), (self.size(), 1), op=op
            )
        ):
            return None
        plan = plan_reduce_scatter(self, output, inputs, op, self.limit_ns(timeout))
        return self._run(with_wire(plan, wire, self.size()), async_op)

    def scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors] | None,
        root: int | Options,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies the root's `inputs[r]` to the `output` of rank r; `inputs` is None or empty on other ranks."""
        if are_options(root):
            inputs = one_list(inputs, "scatter") if inputs else None
            return self.scatter(output, inputs, root.rootRank, True, time_limit(root))
        require_root(self, root, "scatter")
        if async_op is False and timeout is None and isinstance(output, torch.Tensor):
            parts = (self.size() if self._rank == root else 0, 1)
            if self.make_plainly(
                Operation.SCATTER, output.dtype, output.numel(), inputs or (), (output,), parts, root=root
            ):
                return None
        return self._run(plan_scatter(self, output, inputs, root, self.limit_ns(timeout)), async_op)

    def all_to_all(
        self,
        outputs: Sequence[Tensors],
        inputs: Sequence[Tensors],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies `inputs[r]` to rank r, which receives it in its `outputs[this rank]`; each pair has its own size."""
        if async_op is False and timeout is None and inputs and isinstance(inputs[0], torch.Tensor):
            first, parts = inputs[0], (self.size(), self.size())
            if self.make_plainly(Operation.ALL_TO_ALL, first.dtype, first.numel(), inputs, outputs, parts):
                return None
        return self._run(plan_all_to_all(self, outputs, inputs, self.limit_ns(timeout)), async_op)

    def barrier(self, async_op: bool | Options | None = None, timeout: Timeout | None = None) -> Work | None:
        """Waits until every rank has called it."""
        if are_options(async_op):
            async_op, timeout = True, time_limit(async_op)
        if async_op is False and timeout is None and self.barrier_plainly():
            return None
        return self._run(plan_barrier(self.limit_ns(timeout)), async_op)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data` in rank order; the lengths may differ."""
        lengths = torch.empty(self.size(), dtype=torch.int64, device="cpu")
        self.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device="cpu"))
        rooms = [room_for([length]) for length in lengths.tolist()]
        all_gather_pieces(self, [as_tensor(data)], rooms, None)
        return [bytes(as_memory(room)) for (room,) in rooms]

    def explain(self, operation: str, nbytes: int) -> str:
        """Returns which algorithm the group uses for a call of that size, and why."""
        return explain_choice(self._channel, self.backend, self.size(), operation, nbytes)
