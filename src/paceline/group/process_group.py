"""A process group: its ranks, and the collectives on lists of tensors which the public calls use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import profiler

from paceline.durations import Timeout
from paceline.engine.codes import DTYPE_CODES, NO_REDUCTION
from paceline.group.arguments import lists_by_rank, require_counts
from paceline.group.buffers import Buffers, Tensors, as_list, count_elements, dtype_code, is_plain_strided
from paceline.group.exchange import all_gather_pieces, as_memory, as_tensor, room_for
from paceline.group.explaining import explain_choice
from paceline.group.options import Options, are_options, one_list, reduction_of, time_limit
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.reductions import checked_reduction, is_unscaled, reduces
from paceline.group.sparse import all_reduce_sparse
from paceline.group.torch_methods import TorchMethods
from paceline.group.tree_sums import TreeSummingGroup
from paceline.group.work import Work
from paceline.schedule.steps import Operation


class ProcessGroup(TreeSummingGroup, TorchMethods):
    """The ranks that take part in a collective. `init_process_group` and `new_group` make groups.

    Ranks are numbered 0 to size - 1 within the group; `ranks[r]` is rank r's rank in the default group. Methods that
    torch.distributed's groups also have accept torch's option objects. Called without `async_op` they return a `Work`,
    as torch's do: sends and receives return it at once, all others when the call is complete.
    """

    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
        any_order: bool = False,
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place; the argument `any_order` is that of `Buffers`."""
        if isinstance(tensors, torch.Tensor) and timeout is None and not async_op and is_unscaled(op):
            code = None if profiler._is_profiler_enabled else DTYPE_CODES.get(tensors.dtype)
            if code is not None and tensors.is_cpu and is_plain_strided(tensors) and reduces(code, op):
                if self._closed:
                    raise self._closed_error()
                outcome = self._channel.all_reduce(tensors.data_ptr(), tensors.numel(), code, op, self._timeout_ns)
                if outcome is not None:
                    raise self._error(outcome, (0, Operation.ALL_REDUCE, code, op, -1, tensors.numel()))
                return None
        listed = as_list(tensors, "all_reduce")
        if len(listed) == 1 and listed[0].layout is torch.sparse_coo:
            return all_reduce_sparse(self, listed[0], reduction_of(op), async_op, timeout)
        code, reduce_code, buffers = checked_reduction(listed, op, "all_reduce", any_order)
        outputs = [buffers.write(listed)]
        return self._run(
            Operation.ALL_REDUCE, code, reduce_code, -1, count_elements(listed), [], outputs, buffers, async_op, timeout
        )

    def all_reduce_memory(
        self,
        pieces: list[int],
        kept: Sequence[torch.Tensor],
        dtype: int,
        count: int,
        op: ReduceOp,
        async_op: bool = False,
    ) -> Work | None:
        """Does what `all_reduce` does, for `count` elements at the addresses and numbers of bytes in `pieces`.

        It is for callers that make the same call many times and have checked their tensors, which are in `kept`, once.
        """
        buffers = Buffers()
        buffers.kept += kept
        buffers.written += kept
        return self._run(Operation.ALL_REDUCE, dtype, op, -1, count, [], [pieces], buffers, async_op, None)

    def reduce_scatter_memory(
        self, inputs: list[list[int]], output: list[int], kept: list[torch.Tensor], dtype: int, count: int, op: ReduceOp
    ) -> None:
        """Is to `reduce_scatter` what `all_reduce_memory` is to `all_reduce`; each rank receives `count` elements."""
        buffers = Buffers()
        buffers.kept += kept
        self._run(Operation.REDUCE_SCATTER, dtype, op, -1, count, inputs, [output], buffers, False, None)

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
        listed = as_list(tensors, "broadcast")
        code = dtype_code(listed, "broadcast")
        buffers = Buffers(any_order=any_order)
        outputs = [buffers.write(listed)]
        return self._run(
            Operation.BROADCAST,
            code,
            NO_REDUCTION,
            root,
            count_elements(listed),
            [],
            outputs,
            buffers,
            async_op,
            timeout,
        )

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
        listed = as_list(tensors, "reduce")
        code, reduce_code, buffers = checked_reduction(listed, op, "reduce")
        root_or_copy = buffers.write if self._rank == root else buffers.read
        outputs = [root_or_copy(listed)]
        return self._run(
            Operation.REDUCE, code, reduce_code, root, count_elements(listed), [], outputs, buffers, async_op, timeout
        )

    def all_gather(
        self, outputs: Sequence[Tensors], tensors: Tensors, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Copies every rank's `tensors` to all ranks; `outputs[r]` receives those of rank r."""
        return self._gather(Operation.ALL_GATHER, outputs, tensors, -1, async_op, timeout)

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
        if bool(outputs) != (self._rank == root):
            raise ValueError(
                f"rank {self.me.rank}: gather takes gather_list on the destination, rank {self.ranks[root]}, "
                "and on no other rank"
            )
        return self._gather(Operation.GATHER, outputs or [], tensors, root, async_op, timeout)

    def reduce_scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors],
        op: Reduction | Options = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Reduces the ranks' `inputs[r]` into the `output` of rank r."""
        if are_options(op):
            inputs = one_list(inputs, "reduce_scatter")
            return self.reduce_scatter(output, inputs, reduction_of(op), True, time_limit(op))
        if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) and self.size() > 1:
            inputs = one_list(inputs, "reduce_scatter")  # torch's form, without options
        written = as_list(output, "reduce_scatter")
        read = lists_by_rank(inputs, self, "reduce_scatter", "input_list")
        code, reduce_code, buffers = checked_reduction(
            [*written, *(t for each in read for t in each)], op, "reduce_scatter"
        )
        require_counts(read, count_elements(written), self, "reduce_scatter", "input_list")
        flat_inputs = [buffers.read(each) for each in read]
        plain = Buffers()
        flat_outputs = [plain.write(written)]
        plain.kept[:0] = buffers.kept
        return self._run(
            Operation.REDUCE_SCATTER,
            code,
            reduce_code,
            -1,
            count_elements(written),
            flat_inputs,
            flat_outputs,
            plain,
            async_op,
            timeout,
        )

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
        if bool(inputs) != (self._rank == root):
            raise ValueError(
                f"rank {self.me.rank}: scatter takes scatter_list on the source, rank {self.ranks[root]}, "
                "and on no other rank"
            )
        written = as_list(output, "scatter")
        read = lists_by_rank(inputs, self, "scatter", "scatter_list") if inputs else []
        code = dtype_code([*written, *(t for each in read for t in each)], "scatter")
        require_counts(read, count_elements(written), self, "scatter", "scatter_list")
        buffers = Buffers()
        flat_inputs = [buffers.read(each) for each in read]
        flat_outputs = [buffers.write(written)]
        return self._run(
            Operation.SCATTER,
            code,
            NO_REDUCTION,
            root,
            count_elements(written),
            flat_inputs,
            flat_outputs,
            buffers,
            async_op,
            timeout,
        )

    def all_to_all(
        self,
        outputs: Sequence[Tensors],
        inputs: Sequence[Tensors],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies `inputs[r]` to rank r, which receives it in its `outputs[this rank]`; each pair has its own size."""
        read = lists_by_rank(inputs, self, "all_to_all", "input_tensor_list")
        written = lists_by_rank(outputs, self, "all_to_all", "output_tensor_list")
        require_counts(
            [written[self._rank]], count_elements(read[self._rank]), self, "all_to_all", "this rank's part for itself"
        )
        code = dtype_code([t for each in (*read, *written) for t in each], "all_to_all")
        buffers = Buffers()
        flat_inputs = [buffers.read(each) for each in read]
        flat_outputs = [buffers.write(each) for each in written]
        return self._run(
            Operation.ALL_TO_ALL, code, NO_REDUCTION, -1, 0, flat_inputs, flat_outputs, buffers, async_op, timeout
        )

    def barrier(self, async_op: bool | Options | None = None, timeout: Timeout | None = None) -> Work | None:
        """Waits until every rank has called it."""
        if are_options(async_op):
            async_op, timeout = True, time_limit(async_op)
        return self._run(Operation.BARRIER, 0, NO_REDUCTION, -1, 0, [], [], Buffers(), async_op, timeout)

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

    def _gather(
        self,
        operation: Operation,
        outputs: Sequence[Tensors],
        tensors: Tensors,
        root: int,
        async_op: bool | None,
        timeout: Timeout | None,
    ) -> Work | None:
        name = str(operation)
        here = operation is Operation.ALL_GATHER or self._rank == root
        read = as_list(tensors, name)
        written = lists_by_rank(outputs, self, name, "the list of outputs") if here else []
        code = dtype_code([*read, *(t for each in written for t in each)], name)
        require_counts(written, count_elements(read), self, name, "the list of outputs")
        buffers = Buffers()
        flat_inputs = [buffers.read(read)]
        flat_outputs = [buffers.write(each) for each in written]
        return self._run(
            operation,
            code,
            NO_REDUCTION,
            root,
            count_elements(read),
            flat_inputs,
            flat_outputs,
            buffers,
            async_op,
            timeout,
        )
