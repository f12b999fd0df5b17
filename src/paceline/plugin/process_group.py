"""torch.distributed's process group over Paceline's engine.

Every method of torch's is one call of a Paceline group. PyTorch renamed some of them over time; those have both names.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import Work as TorchWork

from paceline.engine.native import NativeEngine
from paceline.group.coalesced import all_reduce_coalesced
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction
from paceline.group.work import JoinedWork, Work
from paceline.plugin.store import BorrowedStore
from paceline.plugin.works import RunningWork, finished
from paceline.security.secret import job_secret

_REDUCTIONS = {
    torch_dist.ReduceOp.SUM: ReduceOp.SUM,
    torch_dist.ReduceOp.AVG: ReduceOp.AVG,
    torch_dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    torch_dist.ReduceOp.MIN: ReduceOp.MIN,
    torch_dist.ReduceOp.MAX: ReduceOp.MAX,
    torch_dist.ReduceOp.BAND: ReduceOp.BAND,
    torch_dist.ReduceOp.BOR: ReduceOp.BOR,
    torch_dist.ReduceOp.BXOR: ReduceOp.BXOR,
}
_SECRET_KEY = "paceline/secret"


def create(options: Any, pg_options: Any = None) -> TorchProcessGroup:
    """The process group that torch.distributed asks for.

    Raises:
        ValueError: `pg_options` were given, which this backend does not have.
        RendezvousError, AuthenticationError: the ranks did not find each other.
    """
    if pg_options is not None:
        raise ValueError(f"the backend 'paceline' has no options; got {type(pg_options).__name__}")
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    store = BorrowedStore(options.store, timeout)
    _share_a_secret(store, rank)
    timeout_s = timeout.total_seconds()
    engine = NativeEngine(store, rank, size, timeout_s, peer=os.environ.get("MASTER_ADDR"))
    opened = engine.open_group(range(size), timeout_s)
    group = ProcessGroup(opened, engine.members, rank, timeout, str(options.group_id))
    group.barrier()
    return TorchProcessGroup(engine, group)


def _share_a_secret(store: BorrowedStore, rank: int) -> None:
    """Without a job's secret the ranks take one from torch's store, which trusts everybody who reaches it anyway."""
    if job_secret() is not None:
        return
    if rank == 0:
        store.set(_SECRET_KEY, secrets.token_hex(32))
    os.environ["PACELINE_SECRET"] = store.get(_SECRET_KEY).decode()


class TorchProcessGroup(torch_dist.ProcessGroup):
    """A group of ranks; made by torch.distributed's `init_process_group` and `new_group`."""

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_tensor_alloc = False
    bound_device_id: torch.device | None = None

    def __init__(self, engine: NativeEngine, group: ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._engine = engine
        self._group = group
        self._name = ""
        self._description = "undefined"

    # What torch.distributed asks of a group besides collectives.

    def getBackendName(self) -> str:
        """The name that messages of torch use."""
        return "paceline"

    def name(self) -> str:
        """Likewise."""
        return "paceline"

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank()

    def size(self) -> int:
        """The number of ranks."""
        return self._group.size()

    getRank = rank
    getSize = size

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's description."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def getGroupName(self) -> str:
        """What torch calls the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """The group's description."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> TorchProcessGroup:
        return self

    def _set_default_backend(self, backend_type: object) -> None:
        """There is only this one."""

    def _get_backend_name(self) -> str:
        return "paceline"

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Calls are numbered by the core."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        """How long later calls wait."""
        self._group.set_timeout(timeout)

    def _wait_for_pending_works(self) -> None:
        self._group.barrier()

    def shutdown(self) -> None:
        """Ends the group for this rank."""
        self._group.close()
        self._engine.close()

    abort = shutdown

    # Collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Of one tensor, or several as if they were one."""
        op = _reduction(opts)
        return self._finish(opts, tensors, lambda a, t: self._group.all_reduce(_only(tensors), op, a, t))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Of several tensors, of several types."""
        op = _reduction(opts)
        return self._finish(opts, tensors, lambda a, t: all_reduce_coalesced(tensors, op, self._group, a, t))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> TorchWork:
        """From the root."""
        return self._finish(opts, tensors, lambda a, t: self._group.broadcast(tensors, opts.rootRank, a, t))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> TorchWork:
        """To the root."""
        op = _reduction(opts)
        return self._finish(opts, tensors, lambda a, t: self._group.reduce(tensors, opts.rootRank, op, a, t))

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Every rank's tensor to all."""
        outputs = _one_list(output_tensors)
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
        outputs = _one_list(output_tensors) if self.rank() == opts.rootRank else None
        return self._finish(
            opts, outputs or [], lambda a, t: self._group.gather(outputs, input_tensors, opts.rootRank, a, t)
        )

    def scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any
    ) -> TorchWork:
        """One tensor of the root's to each rank."""
        inputs = _one_list(input_tensors) if self.rank() == opts.rootRank else None
        return self._finish(
            opts, output_tensors, lambda a, t: self._group.scatter(output_tensors, inputs, opts.rootRank, a, t)
        )

    def reduce_scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> TorchWork:
        """Every rank gets the reduction of its part."""
        op, inputs = _reduction(opts), _one_list(input_tensors)
        return self._finish(
            opts, output_tensors, lambda a, t: self._group.reduce_scatter(output_tensors, inputs, op, a, t)
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Likewise, of parts that lie one behind the other."""
        op = _reduction(opts)
        return self._finish(
            opts, [output], lambda a, t: self._group.reduce_scatter(output, self._parts(input), op, a, t)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Several of `reduce_scatter_single`."""
        op = _reduction(opts)
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
        return self._running(self._group.send(tensors, dst, tag, async_op=True), tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> TorchWork:
        """From one rank."""
        return self._running(self._group.recv(tensors, src, tag, async_op=True), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> TorchWork:
        """From any rank."""
        return self._running(self._group.recv(tensors, -1, tag, async_op=True), tensors)

    # The names that these had, or have, in other releases.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _finish(
        self,
        opts: Any,
        results: Sequence[torch.Tensor],
        call: Callable[[bool, timedelta | None], Work | None],
    ) -> TorchWork:
        work = call(getattr(opts, "asyncOp", True), _timeout(opts))
        return finished(results) if work is None else RunningWork(work, results)

    def _each(
        self,
        opts: Any,
        results: Sequence[torch.Tensor],
        calls: Sequence[Callable[[bool, timedelta | None], Work | None]],
    ) -> TorchWork:
        works = [call(getattr(opts, "asyncOp", True), _timeout(opts)) for call in calls]
        running = [work for work in works if work is not None]
        return RunningWork(JoinedWork(running, "coalesced calls", results), results) if running else finished(results)

    def _running(self, work: Work | None, tensors: list[torch.Tensor]) -> TorchWork:
        assert work is not None
        return RunningWork(work, tensors)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        if not whole.is_contiguous():
            raise ValueError("tensors that hold all ranks' parts must be contiguous")
        flat = whole.detach().view(-1)
        each = flat.numel() // self.size()
        return [flat[r * each : (r + 1) * each] for r in range(self.size())]

    def _rows(self, whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        rows = whole.shape[0] if whole.dim() else 0
        return list(whole.detach().split(list(sizes) or [rows // self.size()] * self.size()))


def _reduction(opts: Any) -> Reduction:
    op = getattr(opts, "reduceOp", torch_dist.ReduceOp.SUM)
    for theirs, ours in _REDUCTIONS.items():
        if op == theirs:
            return ours
    kind, factor = op.__getstate__()
    if kind == torch_dist.ReduceOp.PREMUL_SUM:
        return PremulSum(factor)
    raise ValueError(f"the backend 'paceline' does not know the reduction {op}")


def _timeout(opts: Any) -> timedelta | None:
    timeout: timedelta | None = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


def _only(tensors: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """One tensor by itself takes the fastest way."""
    return tensors[0] if len(tensors) == 1 else tensors


def _one_list(lists: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    if len(lists) != 1:
        raise ValueError(f"the backend 'paceline' takes one list of tensors a process, one device; got {len(lists)}")
    return lists[0]
