"""The methods of torch.distributed's ProcessGroup, through which hooks and programs for torch call a group.

They take torch's option objects, or the arguments that stand for them, and return a `Work` at once. Tensors come in
lists; those in one list are reduced or sent as if they were one tensor. Methods whose names `ProcessGroup` has anyway,
such as `broadcast`, accept both forms of arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.durations import Timeout, to_seconds
from paceline.errors import CollectiveTimeoutError
from paceline.group.arguments import parts_by_rank, rows_by_rank
from paceline.group.base import BaseGroup
from paceline.group.buffers import Tensors
from paceline.group.options import Options, one_list, reduction_of, time_limit
from paceline.group.reduce_op import Reduction
from paceline.group.work import Work, ended


class TorchMethods(BaseGroup):
    """The base class from which `ProcessGroup` inherits these methods."""

    @property
    def group_name(self) -> str:
        """The name that the group was created with, for messages."""
        return self.name

    group_desc = group_name

    def shutdown(self) -> None:
        """Ends the group for this rank, as `destroy_process_group(group)` does."""
        self.close()

    def monitored_barrier(self, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
        """Does what `paceline.monitored_barrier` does."""
        try:
            self.barrier(False, timeout)
        except CollectiveTimeoutError as error:
            missing = error.missing
            if not missing:
                raise
            waited_s = to_seconds(self.timeout if timeout is None else timeout)
            named = f"ranks {list(missing)}" if wait_all_ranks and len(missing) > 1 else f"rank {missing[0]}"
            if not wait_all_ranks and len(missing) > 1:
                named += f" and {len(missing) - 1} more (wait_all_ranks=True names them)"
            told = CollectiveTimeoutError(f"monitored_barrier: {named} did not come within {waited_s:g} s. {error}")
            told.missing = missing
            raise told from None

    def allreduce(
        self,
        tensors: Tensors,
        opts: Reduction | Options | None = None,
        timeout: Timeout | None = None,
        *,
        op: Reduction | None = None,
    ) -> Work:
        """Reduces the tensors over all ranks, in place."""
        reduction, limit = reduction_of(opts if op is None else op), time_limit(opts, timeout)
        return _running(self.all_reduce(_only(tensors), reduction, True, limit))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Options | None = None) -> Work:
        """Reduces tensors of several types over all ranks, in place."""
        reduction, limit = reduction_of(opts), time_limit(opts)
        works = [self.all_reduce(each, reduction, True, limit) for each in tensors]
        return _running(ended(works, "allreduce_coalesced", tensors))

    def allgather(
        self,
        output_tensors: Sequence[Tensors],
        input_tensors: Tensors,
        opts: Options | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copies every rank's tensor to all ranks, into the entries of the only list in `output_tensors`."""
        outputs = one_list(output_tensors, "allgather")
        return _running(self.all_gather(outputs, _only(input_tensors), True, time_limit(opts, timeout)))

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: Options | None = None,
    ) -> Work:
        """Copies every rank's tensors to all ranks: `output_lists[r]` receives those of rank r."""
        written = [output for outputs in output_lists for output in outputs]
        columns = zip(*output_lists, strict=True)
        works = [
            self.all_gather(list(column), tensor, True, time_limit(opts))
            for column, tensor in zip(columns, input_list, strict=True)
        ]
        return _running(ended(works, "allgather_coalesced", written))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Options | None = None) -> Work:
        """Copies every rank's tensor into one tensor on all ranks, concatenated in rank order."""
        parts = parts_by_rank(output, input.numel(), self, "all_gather_single", "output")
        work = self.all_gather(parts, input, True, time_limit(opts))
        return _running(ended([work], "all_gather_single", [output]))

    def all_gather_single_coalesced(
        self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], opts: Options | None = None
    ) -> Work:
        """Does what `all_gather_single` does, for several tensors."""
        pairs = zip(output_list, input_list, strict=True)
        works = [self.all_gather_single(output, tensor, opts) for output, tensor in pairs]
        return _running(ended(works, "all_gather_single_coalesced", output_list))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Options | None = None) -> Work:
        """Reduces the ranks' tensors and gives each rank its part; the parts are concatenated in rank order."""
        parts = parts_by_rank(input, output.numel(), self, "reduce_scatter_single", "input")
        return _running(self.reduce_scatter(output, parts, reduction_of(opts), True, time_limit(opts)))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Options | None = None
    ) -> Work:
        """Does what `reduce_scatter_single` does, for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs]
        return _running(ended(works, "reduce_scatter_single_coalesced", outputs))

    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: Options | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copies `input_tensors[r]` to rank r."""
        return _running(self.all_to_all(output_tensors, input_tensors, True, time_limit(opts, timeout)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Options | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copies rows of `input` to each rank: as many as the split sizes say, or equal parts without split sizes."""
        outputs = rows_by_rank(output, output_split_sizes or None, self, "all_to_all_single", "output")
        inputs = rows_by_rank(input, input_split_sizes or None, self, "all_to_all_single", "input")
        work = self.all_to_all(outputs, inputs, True, time_limit(opts, timeout))
        return _running(ended([work], "all_to_all_single", [output]))

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Work:
        """Receives from the rank whose message arrives first; the work's `source_rank()` returns that rank."""
        return self.recv(_only(tensors), -1, tag, True)

    # The names of these methods in other releases of torch.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _running(work: Work | None) -> Work:
    """Returns `work`, or a finished one for a call without tensors, which has nothing to do."""
    return Work(None, "a call of no tensors") if work is None else work


def _only(tensors: Tensors) -> Tensors:
    """Returns the tensor of a list of one by itself, which takes the fastest path."""
    return tensors[0] if not isinstance(tensors, torch.Tensor) and len(tensors) == 1 else tensors
