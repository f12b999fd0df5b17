"""torch.distributed's process group over Paceline's engine.

Every method of torch's makes one call of Paceline's. PyTorch has renamed some methods over time; those have both names.
Where torch passes an option object, it also passes the values that would be in one: `opts` may be a root's rank, a
reduction or a time limit, and then a single tensor need not be in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from paceline.durations import Timeout
from paceline.errors import CollectiveError
from paceline.group import coalesced, collectives
from paceline.group.arguments import parts_by_rank
from paceline.group.buffers import Tensors
from paceline.group.default import World
from paceline.group.eager import eager_methods
from paceline.group.options import one_list, reduction_of, time_limit
from paceline.group.work import JoinedWork, Work
from paceline.plugin.meeting import Meeting
from paceline.plugin.monitored_barrier import put_into_gloos_words
from paceline.plugin.recovery import Recovery
from paceline.plugin.works import FinishedWork, RunningWork, kept

Call = Callable[[bool, Timeout | None], Work | None]
Lists = Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor]


@eager_methods
class TorchProcessGroup(Recovery):
    """A group of ranks, which torch.distributed's `init_process_group` and `new_group` create.

    Args:
        meeting: who the ranks are, and where they meet.
        world: the group that they have formed; None if `_reconfigure` is to form it.
    """

    def __init__(self, meeting: Meeting, world: World | None) -> None:
        super().__init__(meeting, world)
        self._coalescing: list[Work] | None = None

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> TorchWork:
        """Reduces one tensor, or several as if they were one, over all ranks."""
        by = reduction_of(opts if op is None else op)
        return self._finish(opts, timeout, tensors, lambda a, t: self._group.all_reduce(_only(tensors), by, a, t))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Reduces tensors of several types over all ranks."""
        by = reduction_of(opts)
        return self._finish(
            opts, None, tensors, lambda a, t: coalesced.all_reduce_coalesced(tensors, by, self._group, a, t)
        )

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> TorchWork:
        """Copies the root's tensors to all ranks."""
        source = _root(opts if root is None else root)
        return self._finish(opts, timeout, tensors, lambda a, t: self._group.broadcast(tensors, source, a, t))

    def reduce(
        self,
        tensors: Tensors,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Reduces the tensors of all ranks into those of the root."""
        target = _root(opts if root is None else root)
        by = reduction_of(opts if op is None and hasattr(opts, "reduceOp") else op)
        return self._finish(opts, timeout, tensors, lambda a, t: self._group.reduce(tensors, target, by, a, t))

    def allgather(
        self, output_tensors: Lists, input_tensors: Tensors, opts: Any = None, *, timeout: timedelta | None = None
    ) -> TorchWork:
        """Copies every rank's tensor to all ranks."""
        outputs = one_list(output_tensors, "allgather")
        return self._finish(opts, timeout, outputs, lambda a, t: self._group.all_gather(outputs, input_tensors, a, t))

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], input_list: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Copies every rank's tensors to all ranks: `output_lists[r]` receives those of rank r."""
        return self._finish(
            opts,
            None,
            [output for outputs in output_lists for output in outputs],
            lambda a, t: coalesced.all_gather_coalesced(output_lists, input_list, self._group, a, t),
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Copies every rank's tensor to all ranks, concatenated in rank order."""
        return self._finish(
            opts, None, [output], lambda a, t: collectives.all_gather_into_tensor(output, input, self._group, a, t)
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Does what `all_gather_single` does, for several tensors."""
        return self._finish(
            opts,
            None,
            outputs,
            lambda a, t: coalesced.all_gather_into_tensor_coalesced(outputs, inputs, self._group, a, t),
        )

    def gather(
        self,
        output_tensors: Lists,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Copies every rank's tensor to the root."""
        target = _root(opts if root is None else root)
        outputs = one_list(output_tensors, "gather") if self.rank() == target else None
        return self._finish(
            opts, timeout, outputs or [], lambda a, t: self._group.gather(outputs, input_tensors, target, a, t)
        )

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Copies every rank's tensor to the root, concatenated in rank order."""
        target = _root(opts)
        parts = None
        if self.rank() == target:
            parts = parts_by_rank(output, input.numel(), self._group, "gather_single", "output")
        return self._finish(opts, None, [output], lambda a, t: self._group.gather(parts, input, target, a, t))

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Lists,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Copies one of the root's tensors to each rank."""
        source = _root(opts if root is None else root)
        inputs = one_list(input_tensors, "scatter") if self.rank() == source else None
        return self._finish(
            opts, timeout, output_tensors, lambda a, t: self._group.scatter(output_tensors, inputs, source, a, t)
        )

    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Lists,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> TorchWork:
        """Reduces the ranks' lists of tensors entry by entry; each rank receives its own entry."""
        by, inputs = reduction_of(opts if op is None else op), one_list(input_tensors, "reduce_scatter")
        return self._finish(
            opts, timeout, output_tensors, lambda a, t: self._group.reduce_scatter(output_tensors, inputs, by, a, t)
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Does what `reduce_scatter` does, for parts that are concatenated in rank order."""
        by = reduction_of(opts)
        return self._finish(
            opts, None, [output], lambda a, t: collectives.reduce_scatter_tensor(output, input, by, self._group, a, t)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Does what `reduce_scatter_single` does, for several tensors."""
        by = reduction_of(opts)
        return self._finish(
            opts,
            None,
            outputs,
            lambda a, t: coalesced.reduce_scatter_tensor_coalesced(outputs, inputs, by, self._group, a, t),
        )

    def alltoall(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Copies one tensor from each rank to each rank."""
        return self._finish(
            opts, timeout, output_tensors, lambda a, t: self._group.all_to_all(output_tensors, input_tensors, a, t)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Does what `alltoall` does, for parts concatenated in rank order; without split sizes they are equal."""
        given, taken = output_split_sizes or None, input_split_sizes or None
        return self._finish(
            opts,
            timeout,
            [output],
            lambda a, t: collectives.all_to_all_single(output, input, given, taken, self._group, a, t),
        )

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> TorchWork:
        """Waits until all ranks have called it."""
        return self._finish(opts, timeout, [], self._group.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called it; its errors begin with gloo's words.

        As with gloo, `timeout` is rank 0's, and the other ranks wait for rank 0 as long as the group's calls wait.
        """
        limit = self._group.timeout if timeout is None or timeout < timedelta(0) else timeout
        try:
            self._group.barrier(timeout=limit if self._rank == 0 else max(limit, self._group.timeout))
        except CollectiveError as error:
            self._note_failure()
            put_into_gloos_words(error, self._rank, self._group.ranks, limit, wait_all_ranks)
            raise

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> TorchWork:
        """Sends tensors to one rank."""
        return self._as_torchs(self._group.send(tensors, dst, tag, async_op=True), tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> TorchWork:
        """Receives tensors from one rank."""
        return self._as_torchs(self._group.recv(tensors, src, tag, async_op=True), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> TorchWork:
        """Receives tensors from any rank."""
        return self._as_torchs(self._group.recv(tensors, -1, tag, async_op=True), tensors)

    # The names of these methods in other releases of torch.

    _allgather_base = all_gather_single
    gather_into_tensor = gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        works, self._coalescing = self._coalescing or [], None
        return RunningWork(JoinedWork(works, "coalesced calls", []), [])

    def _finish(self, opts: Any, timeout: timedelta | None, results: Tensors, call: Call) -> TorchWork:
        # Releases of torch whose options have no `asyncOp` wait themselves.
        background = self._coalescing is not None or getattr(opts, "asyncOp", True)
        try:
            work = call(background, time_limit(opts, timeout))
        except CollectiveError:
            self._note_failure()
            raise
        return self._as_torchs(work, results)

    def _as_torchs(self, work: Work | None, results: Tensors) -> TorchWork:
        if work is not None and self._abort_hooks:
            work.when_over(lambda: self._note_failure() if work.exception() is not None else None)
        written = [results] if isinstance(results, torch.Tensor) else results
        if work is None:
            return kept(FinishedWork(written))
        if self._coalescing is not None:
            self._coalescing.append(work)
        return kept(RunningWork(work, written))


def _only(tensors: Tensors) -> Tensors:
    """Returns the tensor of a list of one, which then takes the fast path of `all_reduce`."""
    return tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors


def _root(opts: Any) -> int:
    """Returns the root's group rank from an option object or a number; 0 for None, as in torch's options."""
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))
