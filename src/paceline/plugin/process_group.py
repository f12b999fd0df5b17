"""torch.distributed's process group over Paceline's engine.

Every method of torch's is one call of a Paceline group. PyTorch renamed some of them over time; those have both names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from paceline.engine.native import NativeEngine
from paceline.group.coalesced import all_reduce_coalesced
from paceline.group.process_group import ProcessGroup
from paceline.group.work import JoinedWork, Work, ended
from paceline.plugin.identity import Identity
from paceline.plugin.options import asynchronous, one_list, reduction, time_limit
from paceline.plugin.works import FinishedWork, RunningWork, kept

Call = Callable[[bool, timedelta | None], Work | None]


class TorchProcessGroup(Identity):
    """A group of ranks; made by torch.distributed's `init_process_group` and `new_group`."""

    def __init__(self, engine: NativeEngine, group: ProcessGroup) -> None:
        super().__init__(engine, group)
        self._coalescing: list[Work] | None = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Of one tensor, or several as if they were one."""
        op = reduction(opts)
        return self._finish(opts, tensors, lambda a, t: self._group.all_reduce(_only(tensors), op, a, t))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Of several tensors, of several types."""
        op = reduction(opts)
        return self._finish(opts, tensors, lambda a, t: all_reduce_coalesced(tensors, op, self._group, a, t))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> TorchWork:
        """From the root."""
        return self._finish(opts, tensors, lambda a, t: self._group.broadcast(tensors, opts.rootRank, a, t))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> TorchWork:
        """To the root."""
        op = reduction(opts)
        return self._finish(opts, tensors, lambda a, t: self._group.reduce(tensors, opts.rootRank, op, a, t))

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Every rank's tensor to all."""
        outputs = one_list(output_tensors)
        return self._finish(opts, outputs, lambda a, t: self._group.all_gather(outputs, input_tensors, a, t))

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], input_list: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """`output_lists[i]` takes all ranks' i-th tensors."""
        pairs = list(zip(output_lists, input_list, strict=True))
        return self._each(
            opts,
            [output for outputs in output_lists for output in outputs],
            [lambda a, t, o=outputs, i=tensor: self._group.all_gather(o, i, a, t) for outputs, tensor in pairs],
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Every rank's tensor to one of all, one behind the other."""
        return self._finish(opts, [output], lambda a, t: self._group.all_gather(self._parts(output), input, a, t))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Several of `all_gather_single`."""
        pairs = list(zip(outputs, inputs, strict=True))
        return self._each(
            opts,
            outputs,
            [lambda a, t, o=out, i=tensor: self._group.all_gather(self._parts(o), i, a, t) for out, tensor in pairs],
        )

    def gather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any
    ) -> TorchWork:
        """Every rank's tensor to the root."""
        outputs = one_list(output_tensors) if self.rank() == opts.rootRank else None
        return self._finish(
            opts, outputs or [], lambda a, t: self._group.gather(outputs, input_tensors, opts.rootRank, a, t)
        )

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> TorchWork:
        """Every rank's tensor to one of the root's, one behind the other."""
        outputs = self._parts(output) if self.rank() == opts.rootRank else None
        return self._finish(opts, [output], lambda a, t: self._group.gather(outputs, input, opts.rootRank, a, t))

    def scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any
    ) -> TorchWork:
        """One tensor of the root's to each rank."""
        inputs = one_list(input_tensors) if self.rank() == opts.rootRank else None
        return self._finish(
            opts, output_tensors, lambda a, t: self._group.scatter(output_tensors, inputs, opts.rootRank, a, t)
        )

    def reduce_scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> TorchWork:
        """Every rank gets the reduction of its part."""
        op, inputs = reduction(opts), one_list(input_tensors)
        return self._finish(
            opts, output_tensors, lambda a, t: self._group.reduce_scatter(output_tensors, inputs, op, a, t)
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Likewise, of parts that lie one behind the other."""
        op = reduction(opts)
        return self._finish(
            opts, [output], lambda a, t: self._group.reduce_scatter(output, self._parts(input), op, a, t)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Several of `reduce_scatter_single`."""
        op = reduction(opts)
        pairs = list(zip(outputs, inputs, strict=True))
        return self._each(
            opts,
            outputs,
            [
                lambda a, t, o=out, i=tensor: self._group.reduce_scatter(o, self._parts(i), op, a, t)
                for out, tensor in pairs
            ],
        )

    def alltoall(
        self, output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """One tensor from each rank to each."""
        return self._finish(
            opts, output_tensors, lambda a, t: self._group.all_to_all(output_tensors, input_tensors, a, t)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> TorchWork:
        """Likewise, of parts that lie one behind the other."""
        outputs, inputs = self._rows(output, output_split_sizes), self._rows(input, input_split_sizes)
        return self._finish(opts, [output], lambda a, t: self._group.all_to_all(outputs, inputs, a, t))

    def barrier(self, opts: Any = None) -> TorchWork:
        """Over when all ranks have come."""
        return self._finish(opts, [], self._group.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who did not come, which all calls do."""
        self._group.barrier(timeout=timeout)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> TorchWork:
        """To one rank."""
        return self._as_torchs(self._group.send(tensors, dst, tag, async_op=True), tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> TorchWork:
        """From one rank."""
        return self._as_torchs(self._group.recv(tensors, src, tag, async_op=True), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> TorchWork:
        """From any rank."""
        return self._as_torchs(self._group.recv(tensors, -1, tag, async_op=True), tensors)

    # The names that these had, or have, in other releases.

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

    def _finish(self, opts: Any, results: Sequence[torch.Tensor], call: Call) -> TorchWork:
        return self._as_torchs(call(self._asynchronous(opts), time_limit(opts)), results)

    def _each(self, opts: Any, results: Sequence[torch.Tensor], calls: Sequence[Call]) -> TorchWork:
        asynchronously, limit = self._asynchronous(opts), time_limit(opts)
        works = [call(asynchronously, limit) for call in calls]
        return self._as_torchs(ended(works, "coalesced calls", results), results)

    def _asynchronous(self, opts: Any) -> bool:
        return self._coalescing is not None or asynchronous(opts)

    def _as_torchs(self, work: Work | None, results: Sequence[torch.Tensor]) -> TorchWork:
        if work is None:
            return kept(FinishedWork(results))
        if self._coalescing is not None:
            self._coalescing.append(work)
        return kept(RunningWork(work, results))

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        if not whole.is_contiguous():
            raise ValueError("tensors that hold all ranks' parts must be contiguous")
        flat = whole.detach().view(-1)
        each = flat.numel() // self.size()
        return [flat[r * each : (r + 1) * each] for r in range(self.size())]

    def _rows(self, whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        rows = whole.shape[0] if whole.dim() else 0
        return list(whole.detach().split(list(sizes) or [rows // self.size()] * self.size()))


def _only(tensors: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """One tensor by itself takes the fastest way."""
    return tensors[0] if len(tensors) == 1 else tensors
