"""Process groups, with methods for all calls on a group.

A call takes one of two paths to the engine. Most calls are synchronous and use plain CPU tensors, and for small tensors
checking and describing a call takes longer than moving the data. The fast path (`all_reduce`, `broadcast`,
`try_fast_call`, and `all_reduce_memory` for gradients) therefore performs only the checks that every call needs, and
passes addresses. Calls with unusual or invalid arguments take the slow path through `call_plan.py`, which checks the
arguments in full, and `ProcessGroup._run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from operator import is_
from typing import Literal

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.comm.engine.api import OpenGroup
from paceline.comm.engine.channel import (
    DTYPE_CODES,
    ITEM_SIZES,
    NO_REDUCTION,
    CallOutcome,
    CollectiveCall,
    DevicePieces,
    EngineChannel,
    HeaderFields,
    OutcomeCode,
    PendingCall,
    ReduceOp,
    Reduction,
    dtype_name,
)
from paceline.comm.engine.failures import GROUP_LOST, MESSAGES_LOST, RankIdentity, describe_call, to_error
from paceline.comm.engine.native.engine import ScheduledChannel
from paceline.comm.engine.network_settings import ALGORITHM_VARIABLE
from paceline.comm.engine.staged.channel import StagedChannel
from paceline.comm.group.buffers import (
    Buffers,
    Tensors,
    address_of,
    as_list,
    as_memory,
    as_tensor,
    count_elements,
    count_writes,
    dtype_code,
    empty_buffers,
    is_plain,
    unpack_single,
)
from paceline.comm.group.call_plan import (
    QUICK_CODES,
    CallPlan,
    RankMap,
    TorchOptions,
    are_options,
    are_uneven,
    checked_tag,
    one_list,
    parts_by_rank,
    plan_all_gather,
    plan_all_reduce,
    plan_all_to_all,
    plan_barrier,
    plan_broadcast,
    plan_gather,
    plan_reduce,
    plan_reduce_scatter,
    plan_scatter,
    plan_uneven_reduce_scatter,
    reduction_of,
    required_reduction,
    rows_by_rank,
    split_sizes,
    time_limit,
)
from paceline.comm.group.compression import Wire, WireKind, WireLike, is_quantizable, with_wire
from paceline.comm.group.engines import Devices, Opener
from paceline.comm.group.sparse_sum import SparseSum
from paceline.comm.group.work import ProfiledCall, Work, join_works
from paceline.comm.record import recorder
from paceline.comm.schedule.algorithms import explain_text
from paceline.comm.schedule.quantized import WIRES
from paceline.comm.schedule.steps import Operation
from paceline.durations import Timeout, to_nanoseconds
from paceline.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError

ANY_SOURCE = -1

_LEAST_ROUNDED = 1024
"""The number of elements below which a group's own `wire` does not round a sum.

Small tensors are often norms or counts, and rounding them would not save time.
"""

_ROUNDED_ONCE = (torch.float16, torch.bfloat16)  # the core accumulates these dtypes in float32
_STRIDED = torch.strided
_NO_OP = object()  # placeholder for operations without a reduction


class ProcessGroup:
    """A group of ranks that participate in collectives, created by `init_process_group` and `new_group`.

    Ranks are numbered 0 to size - 1 within the group; `ranks[r]` is rank r's rank in the default group. Methods with
    the same names as those of torch.distributed's groups accept torch's option objects. Without `async_op` they return
    a `Work`, as in torch: sends and receives return it immediately, and all other methods return it when the call is
    complete.

    Args:
        opened: the engine's group for CPU tensors.
        members: the ranks in the group with their hosts and processes, in the order of their group ranks.
        group_rank: this process's rank in the group.
        timeout, name, backend, wire: see the attributes.
        openers: the functions that open the group on other devices, by device type.
        advice: the advice in error messages about tensors on a device without an opener; the default advice suggests an
            engine.
        engine_members: the members of the engine, if the engine connects more ranks than this group contains.
        identity: a number that identifies the group in recordings, the same on all members, or 0 if there is none.

    Attributes:
        rank_map: the members of the group, with conversions between group ranks and ranks in the default group.
        ranks: the members' ranks in the default group, in the order of their group ranks.
        name: the group's name in error messages.
        backend: the backend's name, which `get_backend` returns.
        timeout_ns: the time that calls wait for the other ranks, in nanoseconds.
        bound_device_id: this rank's accelerator if `bind` has connected it, otherwise None.
        wire: the format to which all_reduce and reduce_scatter round floats between hosts unless a call passes a
            `wire`, or None for exact sums. all_gather stays exact, because it often moves parameters, whose drift would
            go unnoticed.
    """

    def __init__(
        self,
        opened: OpenGroup,
        members: Sequence[RankIdentity],
        group_rank: int,
        timeout: Timeout,
        name: str,
        backend: str = "paceline",
        openers: Mapping[str, Opener] | None = None,
        advice: str = "",
        engine_members: Sequence[RankIdentity] = (),
        identity: int = 0,
        wire: WireKind | None = None,
    ) -> None:
        self.rank_map = RankMap(
            members, group_rank, f"ProcessGroup({name or 'default'}, rank {group_rank} of {len(members)})"
        )
        self.ranks = self.rank_map.ranks
        self.name = name
        self.backend = backend
        self.wire = wire
        self.profiled_as = "paceline"  # prefix for events in profiles, such as `paceline:all_reduce`
        recorder.begin()
        recorder.identify_once(self.ranks[group_rank], len(engine_members or members))
        ranks = self.ranks

        def record(on_device: OpenGroup, device_type: str) -> int:
            serial = recorder.open_group(name, f"{backend} on {device_type}", identity, group_rank, ranks)
            on_device.record_as(serial)
            return serial

        self.bound_device_id: torch.device | None = None
        self._devices = Devices(opened, openers or {}, backend, record, advice)
        self._channel = opened.channel
        self._engine_members = engine_members
        self._rank = group_rank
        self._closed = False
        self._closed_why = (
            "this process group was destroyed (destroy_process_group); create a new one with init_process_group or "
            "new_group"
        )
        self._abandoned: list[Buffers] = []
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return repr(self.rank_map)

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return len(self.ranks)

    @property
    def me(self) -> RankIdentity:
        """Returns this rank with its host and process, formatted in error messages as "rank 3 (host, pid 4711)"."""
        return self.rank_map.me

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """Returns the ranks with their hosts and processes, in the order of their group ranks."""
        return self.rank_map.members

    @property
    def device_types(self) -> frozenset[str]:
        """Returns the device types that the group supports, such as "cpu" and "cuda"."""
        return self._devices.types

    @property
    def on_cpu(self) -> OpenGroup:
        """Returns the engine's group for CPU tensors."""
        return self._devices.of([], "")

    @property
    def timeout(self) -> timedelta:
        """Returns the time that calls wait for the other ranks."""
        return timedelta(microseconds=self.timeout_ns / 1000)

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets `timeout` for later calls."""
        self.timeout_ns = to_nanoseconds(timeout)

    def bind(self, device: torch.device | None) -> None:
        """Connects the group on this rank's accelerator; all ranks must call this. Does nothing if `device` is None.

        Raises:
            CollectiveError: the devices cannot be connected; the group is closed.
        """
        if device is None:
            return
        try:
            self.all_reduce(torch.zeros(1, device=device))
            torch.accelerator.current_stream(device).synchronize()
        except BaseException:
            self.close()
            raise
        self.bound_device_id = device

    @property
    def is_closed(self) -> bool:
        """Returns True if this rank has closed the group."""
        return self._closed

    def abort(self) -> None:
        """Makes every current and later call on the group raise a `GroupAbortedError` on all ranks.

        Any thread may call this while other threads are waiting in calls on the group; it does not wait for other
        ranks. Use it from a thread that detects that the group cannot continue, for instance because a rank must be
        replaced. `close` must still be called afterward. With the engines "gloo", "mpi" and "nccl" only this rank's
        calls are aborted; with "gloo" and "mpi", calls in progress continue until they time out.
        """
        self._devices.abort()

    def failure(self) -> OutcomeCode:
        """Returns the reason why the group is unusable, or OK if this rank has not detected a failure."""
        return OutcomeCode(self._devices.failure())

    def close(self) -> None:
        """Closes the group on this rank; idempotent."""
        self._closed = True
        self._devices.close()

    def close_with_reason(self, why: str) -> None:
        """Closes the group on this rank; errors from later calls contain the reason `why`."""
        self._closed_why = why
        self.close()

    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
        any_order: bool = False,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place; see `Buffers` for `any_order`."""
        if timeout is None and wire is self.wire is None and not async_op and not profiler._is_profiler_enabled:
            # Most calls take this path, in which every line adds latency.
            try:
                outcome = self._channel.all_reduce_tensor(tensors, op, self.timeout_ns)
            except TypeError:  # the core does not accept None
                as_list(tensors, "all_reduce")
                required_reduction(op)
                raise
            if outcome is False:
                outcome = self.fast_all_reduce(tensors, op)
            if outcome is None:
                return None
            if outcome is not False:
                assert isinstance(tensors, torch.Tensor) and isinstance(op, ReduceOp)
                code = DTYPE_CODES[tensors.dtype]
                raise self._error(outcome, (0, Operation.ALL_REDUCE, code, op, -1, tensors.numel()))
        listed = as_list(tensors, "all_reduce")
        if wire is None and len(listed) == 1 and listed[0].layout is torch.sparse_coo:
            return self._all_reduce_sparse(listed[0], required_reduction(op), async_op, timeout)
        return self._run(plan_all_reduce(listed, op, self.limit_ns(timeout), any_order), async_op, wire)

    def _all_reduce_sparse(
        self, tensor: torch.Tensor, op: Reduction, async_op: bool, timeout: Timeout | None
    ) -> Work | None:
        """Reduces a sparse COO tensor over all ranks, in place, and leaves it coalesced.

        The ranks first exchange their row counts, so even with `async_op` this method blocks until all ranks have
        called it. The rows are then sent in the background.
        """
        total = SparseSum(tensor, op)
        headers = [torch.empty_like(total.header) for _ in self.ranks]
        self.all_gather(headers, total.header, timeout=timeout)
        rows = total.allocate(headers, self.rank_map)
        work = self.all_to_all(rows.received, [rows.mine] * self.size(), async_op, timeout)
        return join_works([work], "all_reduce", [tensor], lambda: total.write(rows))

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
        """Performs an `all_reduce` on `count` elements in `pieces` of memory (addresses and numbers of bytes).

        Intended for callers that repeat a call and have already checked the tensors. `kept` contains these tensors,
        which must be on the same device.
        """
        call = CollectiveCall(Operation.ALL_REDUCE, dtype, op, -1, count, self.timeout_ns, [], [pieces])
        if wire is None and not async_op and kept and kept[0].is_cpu and not profiler._is_profiler_enabled:
            self.run_on_cpu(call, kept)
            return None
        if kept and not kept[0].is_cpu:
            call = call._replace(outputs=[DevicePieces(kept, pieces)])
        buffers = Buffers()
        buffers.kept += kept
        buffers.written += kept
        return self._run((call, buffers), async_op, wire)

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
        """Performs a `reduce_scatter` on memory (see `all_reduce_memory`); each rank receives `count` elements.

        With an `update`, no output is needed; only groups for which `applies_updates` is true accept updates.
        """
        buffers = Buffers()
        buffers.kept += kept
        call = CollectiveCall(
            Operation.REDUCE_SCATTER, dtype, op, -1, count, self.timeout_ns, inputs, outputs, update=update
        )
        self._run((call, buffers), False)

    def broadcast(
        self,
        tensors: Tensors,
        root: int | TorchOptions = 0,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
        any_order: bool = False,
    ) -> Work | None:
        """Copies the root's `tensors` to all ranks."""
        if are_options(root):
            return self.broadcast(tensors, root.rootRank, True, time_limit(root))
        self.rank_map.require_root(root, "broadcast")
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
        return self._run(plan_broadcast(self.rank_map, tensors, root, self.limit_ns(timeout), any_order), async_op)

    def reduce(
        self,
        tensors: Tensors,
        root: int | TorchOptions = 0,
        op: Reduction = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks into the root's `tensors`; tensors on other ranks are not modified."""
        if are_options(root):
            return self.reduce(tensors, root.rootRank, reduction_of(root), True, time_limit(root))
        self.rank_map.require_root(root, "reduce")
        if (
            async_op is False
            and timeout is None
            and isinstance(tensors, torch.Tensor)
            and self.try_fast_call(
                Operation.REDUCE, tensors.dtype, tensors.numel(), (), (tensors,), (0, 1), op=op, root=root
            )
        ):
            return None
        return self._run(plan_reduce(self.rank_map, tensors, root, op, self.limit_ns(timeout)), async_op)

    def all_gather(
        self,
        outputs: Sequence[Tensors],
        tensors: Tensors,
        async_op: bool = False,
        timeout: Timeout | None = None,
        wire: WireLike = None,
    ) -> Work | None:
        """Gathers every rank's `tensors` on all ranks; `outputs[r]` receives rank r's tensors; sizes may differ."""
        if (
            async_op is False
            and timeout is None
            and wire is None
            and isinstance(tensors, torch.Tensor)
            and self.try_fast_call(
                Operation.ALL_GATHER, tensors.dtype, tensors.numel(), (tensors,), outputs, (1, self.size())
            )
        ):
            return None
        return self._run(plan_all_gather(self.rank_map, outputs, tensors, self.limit_ns(timeout)), async_op, wire)

    def gather(
        self,
        outputs: Sequence[Tensors] | None,
        tensors: Tensors,
        root: int | TorchOptions,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Gathers every rank's `tensors` on the root; `outputs` is None or empty on other ranks."""
        if are_options(root):
            outputs = one_list(outputs, "gather") if outputs else None
            return self.gather(outputs, tensors, root.rootRank, True, time_limit(root))
        self.rank_map.require_root(root, "gather")
        if async_op is False and timeout is None and isinstance(tensors, torch.Tensor):
            parts = (1, self.size() if self._rank == root else 0)
            if self.try_fast_call(
                Operation.GATHER, tensors.dtype, tensors.numel(), (tensors,), outputs or (), parts, root=root
            ):
                return None
        return self._run(plan_gather(self.rank_map, outputs, tensors, root, self.limit_ns(timeout)), async_op)

    def reduce_scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors],
        op: Reduction | TorchOptions = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces `inputs[r]` over all ranks into the `output` of rank r; the parts may differ in size."""
        if are_options(op):
            inputs = one_list(inputs, "reduce_scatter")
            return self.reduce_scatter(output, inputs, reduction_of(op), True, time_limit(op))
        has_one = isinstance(inputs, (list, tuple)) and len(inputs) == 1
        if has_one and isinstance(inputs[0], (list, tuple)) and self.size() > 1:
            inputs = one_list(inputs, "reduce_scatter")  # torch's calling convention, without options
        if (
            async_op is False
            and timeout is None
            and wire is None
            and isinstance(output, torch.Tensor)
            and self.try_fast_call(
                Operation.REDUCE_SCATTER, output.dtype, output.numel(), inputs, (output,), (self.size(), 1), op=op
            )
        ):
            return None
        if are_uneven(inputs, self.rank_map, "reduce_scatter"):
            plans = plan_uneven_reduce_scatter(self.rank_map, output, inputs, op, self.limit_ns(timeout))
            works = [self._run(plan, async_op, wire) for plan in plans]
            return join_works(works, "reduce_scatter", as_list(output, "reduce_scatter"))
        plan = plan_reduce_scatter(self.rank_map, output, inputs, op, self.limit_ns(timeout))
        return self._run(plan, async_op, wire)

    def scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors] | None,
        root: int | TorchOptions,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies the root's `inputs[r]` to the `output` of rank r; `inputs` is None or empty on other ranks."""
        if are_options(root):
            inputs = one_list(inputs, "scatter") if inputs else None
            return self.scatter(output, inputs, root.rootRank, True, time_limit(root))
        self.rank_map.require_root(root, "scatter")
        if async_op is False and timeout is None and isinstance(output, torch.Tensor):
            parts = (self.size() if self._rank == root else 0, 1)
            if self.try_fast_call(
                Operation.SCATTER, output.dtype, output.numel(), inputs or (), (output,), parts, root=root
            ):
                return None
        return self._run(plan_scatter(self.rank_map, output, inputs, root, self.limit_ns(timeout)), async_op)

    def all_to_all(
        self,
        outputs: Sequence[Tensors],
        inputs: Sequence[Tensors],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Sends `inputs[r]` to each rank r, and receives data from each rank s into `outputs[s]`; sizes may differ."""
        are_listed = isinstance(inputs, (list, tuple)) and bool(inputs)
        if are_listed and async_op is False and timeout is None and isinstance(inputs[0], torch.Tensor):
            first, parts = inputs[0], (self.size(), self.size())
            if self.try_fast_call(Operation.ALL_TO_ALL, first.dtype, first.numel(), inputs, outputs, parts):
                return None
        return self._run(plan_all_to_all(self.rank_map, outputs, inputs, self.limit_ns(timeout)), async_op)

    def all_to_all_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Performs an all_to_all on the rows of two tensors, divided by the split sizes or, if None, in equal parts."""
        call = "all_to_all_single"
        received = split_sizes(output_split_sizes, call, "output_split_sizes")
        sent = split_sizes(input_split_sizes, call, "input_split_sizes")
        outputs = rows_by_rank(output, received, self.rank_map, call, "output")
        inputs = rows_by_rank(input, sent, self.rank_map, call, "input")
        plan = plan_all_to_all(self.rank_map, outputs, inputs, self.limit_ns(timeout))
        plan[1].profiled = [input]
        return join_works([self._run(plan, async_op)], "all_to_all_single", [output])

    def barrier(self, async_op: bool | TorchOptions | None = None, timeout: Timeout | None = None) -> Work | None:
        """Waits until every rank has called this method."""
        if are_options(async_op):
            async_op, timeout = True, time_limit(async_op)
        if async_op is False and timeout is None and self.try_fast_barrier():
            return None
        return self._run(plan_barrier(self.limit_ns(timeout)), async_op)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data` in rank order; the lengths may differ."""
        lengths = torch.empty(self.size(), dtype=torch.int64, device="cpu")
        self.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device="cpu"))
        received = empty_buffers(lengths.tolist())
        if any(buffer.numel() for buffer in received):
            self.all_gather(received, as_tensor(data))
        return [bytes(as_memory(buffer)) for buffer in received]

    def explain(self, operation: str, nbytes: int) -> str:
        """Returns text that explains which algorithm the group uses for a call on `nbytes` bytes, and why.

        Raises:
            ValueError: there is no operation with that name.
        """
        try:
            chosen = Operation.named(operation)
        except ValueError as error:
            raise ValueError(f"explain: {error}") from None
        if isinstance(self._channel, ScheduledChannel):
            return explain_text(self._channel.choose(chosen, nbytes))
        call = f"{chosen} of {nbytes:,} bytes on {self.size()} ranks"
        if not self.backend.endswith("paceline"):
            return f"{call}: the library of {self.backend!r} chooses the algorithm\n"
        return (
            f"{call}, 1 host\n"
            "\n"
            "-> direct: every rank reads the others' parts directly from shared memory, so nothing is forwarded.\n"
            "\n"
            f"Algorithms are only used here if forced (algorithm=, or {ALGORITHM_VARIABLE}).\n"
        )

    def sums_as_tree(self, tensor: torch.Tensor) -> bool:
        """Returns True if `sum_as_tree` accepts tensors like this one; the result is the same on all ranks."""
        # Within one host the core adds along this tree. Schedules and other engines add in different orders.
        return isinstance(self._channel, _core.HostGroup) and tensor.is_cpu and tensor.dtype not in _ROUNDED_ONCE

    def sum_as_tree(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Sums `inputs` over all ranks into `outputs` along a pairwise tree; each partial sum is rounded to the dtype.

        With 8 ranks, the result is ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).

        Args:
            outputs: the inputs themselves, or tensors of the same shapes and dtype that share no memory with them.
            inputs: tensors of one dtype that `sums_as_tree` accepts.
        """
        code = dtype_code([*inputs, *outputs], "sum_as_tree")
        buffers = Buffers()
        in_place = all(map(is_, inputs, outputs))
        read = [] if in_place else [buffers.read(inputs)]
        written = [buffers.write(outputs)]
        count = count_elements(inputs)
        call = CollectiveCall(Operation.ALL_REDUCE, code, ReduceOp.SUM, -1, count, self.timeout_ns, read, written)
        self._run((call, buffers), False)

    def send(
        self, tensors: Tensors, dst: int, tag: int = 0, async_op: bool = True, timeout: Timeout | None = None
    ) -> Work | None:
        """Sends `tensors` to group rank `dst`, which calls `recv` with the same tag, dtype and number of elements."""
        work = self._pass("send", as_list(tensors, "send"), dst, tag, async_op, timeout)
        return work if async_op else None

    def recv(
        self,
        tensors: Tensors,
        src: int = ANY_SOURCE,
        tag: int = 0,
        async_op: bool = True,
        timeout: Timeout | None = None,
    ) -> Work:
        """Receives a message with the given tag into `tensors`, from group rank `src`, or from any rank if `src` is -1.

        `source_rank()` of the returned work is the sender's group rank.
        """
        return self._pass("recv", as_list(tensors, "recv"), src, tag, async_op, timeout)

    @property
    def group_name(self) -> str:
        """The group's name in error messages."""
        return self.name

    group_desc = group_name

    def shutdown(self) -> None:
        """Closes the group on this rank, like `destroy_process_group(group)`."""
        self.close()

    def monitored_barrier(self, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
        """Same as `paceline.monitored_barrier` on this group."""
        try:
            self.barrier(False, timeout)
        except CollectiveTimeoutError as error:
            missing = error.missing
            if not missing:
                raise
            waited_s = self.limit_ns(timeout) / 1e9
            named = f"ranks {list(missing)}" if wait_all_ranks and len(missing) > 1 else f"rank {missing[0]}"
            if not wait_all_ranks and len(missing) > 1:
                named += f" and {len(missing) - 1} more (wait_all_ranks=True lists them)"
            summary = CollectiveTimeoutError(
                f"monitored_barrier: {named} did not reach it within {waited_s:g} s. {error}"
            )
            summary.missing = missing
            raise summary from None

    def allreduce(
        self,
        tensors: Tensors,
        opts: Reduction | TorchOptions | None = None,
        timeout: Timeout | None = None,
        *,
        op: Reduction | None = None,
    ) -> Work:
        """Reduces the tensors over all ranks, in place."""
        reduction, limit = reduction_of(opts if op is None else op), time_limit(opts, timeout)
        return _as_work(self.all_reduce(unpack_single(tensors), reduction, True, limit))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: TorchOptions | None = None) -> Work:
        """Reduces tensors of several dtypes over all ranks, in place."""
        reduction, limit = reduction_of(opts), time_limit(opts)
        works = [self.all_reduce(tensor, reduction, True, limit) for tensor in tensors]
        return _as_work(join_works(works, "allreduce_coalesced", tensors))

    def allgather(
        self,
        output_tensors: Sequence[Tensors],
        input_tensors: Tensors,
        opts: TorchOptions | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Gathers every rank's tensor on all ranks, into the entries of the single list in `output_tensors`."""
        outputs = one_list(output_tensors, "allgather")
        return _as_work(self.all_gather(outputs, unpack_single(input_tensors), True, time_limit(opts, timeout)))

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: TorchOptions | None = None,
    ) -> Work:
        """Gathers every rank's tensors on all ranks; `output_lists[r]` receives rank r's tensors."""
        written = [output for outputs in output_lists for output in outputs]
        columns = zip(*output_lists, strict=True)
        works = [
            self.all_gather(list(column), tensor, True, time_limit(opts))
            for column, tensor in zip(columns, input_list, strict=True)
        ]
        return _as_work(join_works(works, "allgather_coalesced", written))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: TorchOptions | None = None) -> Work:
        """Gathers every rank's tensor into one tensor on all ranks, concatenated in rank order."""
        parts = parts_by_rank(output, input.numel(), self.rank_map, "all_gather_single", "output")
        work = self.all_gather(parts, input, True, time_limit(opts))
        return _as_work(join_works([work], "all_gather_single", [output]))

    def all_gather_single_coalesced(
        self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], opts: TorchOptions | None = None
    ) -> Work:
        """Calls `all_gather_single` for each pair of tensors."""
        pairs = zip(output_list, input_list, strict=True)
        works = [self.all_gather_single(output, tensor, opts) for output, tensor in pairs]
        return _as_work(join_works(works, "all_gather_single_coalesced", output_list))

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: TorchOptions | None = None
    ) -> Work:
        """Reduces `input` over all ranks and writes one part of the result to each rank's `output`."""
        parts = parts_by_rank(input, output.numel(), self.rank_map, "reduce_scatter_single", "input")
        return _as_work(self.reduce_scatter(output, parts, reduction_of(opts), True, time_limit(opts)))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: TorchOptions | None = None
    ) -> Work:
        """Calls `reduce_scatter_single` for each pair of tensors."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs]
        return _as_work(join_works(works, "reduce_scatter_single_coalesced", outputs))

    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: TorchOptions | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Sends `input_tensors[r]` to each rank r, and receives data from each rank s into `output_tensors[s]`."""
        return _as_work(self.all_to_all(output_tensors, input_tensors, True, time_limit(opts, timeout)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: TorchOptions | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Sends rows of `input` to each rank, as given by the split sizes or, by default, in equal parts."""
        limit = time_limit(opts, timeout)
        work = self.all_to_all_rows(output, input, output_split_sizes, input_split_sizes, True, limit)
        return _as_work(work)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Work:
        """Receives the first message to arrive; `source_rank()` of the returned work is the sender's group rank."""
        return self.recv(unpack_single(tensors), -1, tag, True)

    # Aliases under which other releases of torch call these methods.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def fast_all_reduce(self, tensor: object, op: object) -> CallOutcome | Literal[False] | None:
        """Equivalent of a channel's `all_reduce_tensor` that works with any channel and any release of PyTorch."""
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

    def try_fast_call(
        self,
        operation: Operation,
        dtype: torch.dtype,
        count: int,
        inputs: Sequence[object],
        outputs: Sequence[object],
        parts: tuple[int, int],
        *,
        op: object = _NO_OP,
        root: int = -1,
        are_whole: bool = False,
    ) -> bool:
        """Executes the call and returns True if all tensors are plain; otherwise returns False without any effect.

        Args:
            operation: any operation except all_reduce and broadcast, which have separate, shorter paths.
            dtype: the dtype of all tensors.
            count: the number of elements in a part.
            inputs, outputs: the tensors.
            parts: the required numbers of parts in the inputs and in the outputs.
            op, root: the reduction and the root's group rank, if the operation has them.
            are_whole: True if a single tensor contains all parts of the inputs, and another all parts of the outputs.
        """
        quick = None if profiler._is_profiler_enabled else QUICK_CODES.get(dtype)
        if quick is None:
            return False
        reduce_code = NO_REDUCTION
        if op is not _NO_OP:
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

    def try_fast_all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Performs an all_gather into one tensor; see `try_fast_call`."""
        parts = (1, self.size())
        operation = Operation.ALL_GATHER
        return self.try_fast_call(operation, part.dtype, part.numel(), (part,), (whole,), parts, are_whole=True)

    def try_fast_reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: object) -> bool:
        """Performs a reduce_scatter of one tensor; see `try_fast_call`."""
        parts = (self.size(), 1)
        operation = Operation.REDUCE_SCATTER
        return self.try_fast_call(operation, part.dtype, part.numel(), (whole,), (part,), parts, op=op, are_whole=True)

    def try_fast_all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Performs an all_to_all on equal parts of two tensors; see `try_fast_call`."""
        ranks = self.size()
        if input.dim() == 0 or output.dim() == 0 or input.shape[0] % ranks or output.shape[0] % ranks:
            return False
        count = input.numel() // ranks
        operation = Operation.ALL_TO_ALL
        return self.try_fast_call(operation, input.dtype, count, (input,), (output,), (ranks, ranks), are_whole=True)

    def try_fast_barrier(self) -> bool:
        """Waits for all ranks and returns True, or returns False immediately while a profiler is recording."""
        if profiler._is_profiler_enabled:
            return False
        self._run_equal(Operation.BARRIER, 0, NO_REDUCTION, -1, 0, 0, [], [], ())
        return True

    def run_on_cpu(self, call: CollectiveCall, kept: Sequence[torch.Tensor]) -> None:
        """Executes a call that writes to the checked CPU tensors `kept`. A profiler must not be recording."""
        if self._closed:
            raise self.closed_error()
        count_writes(kept)
        outcome = self._channel.run(call)
        if outcome is not None:
            raise self._abandon(outcome, call, kept)

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
            call = CollectiveCall(operation, code, reduce_code, root, count, limit_ns, inputs, outputs)
            raise self._abandon(outcome, call, kept)

    def _run(self, plan: CallPlan, async_op: bool | None, wire: WireLike = None) -> Work | None:
        """Executes a planned call with the engine for the device of its tensors.

        If `async_op` is None, waits and returns a finished `Work`, like torch's methods.
        """
        if self._closed:
            raise self.closed_error()
        if wire is not None:
            plan = with_wire(plan, wire, self.size())
        elif self.wire is not None:
            plan = self._rounded(plan, self.wire)
        call, buffers = plan
        recording = self.recording(str(call.operation), _shown(plan)) if profiler._is_profiler_enabled else None
        channel = self._channel_of(call, buffers)
        if async_op:
            work = self.work_of(channel.submit(call), plan)
            if recording is not None:
                recording.end_with(work)
            return work
        count_writes(self.written_by(plan))
        outcome = channel.run(call)
        if recording is not None:
            recording.end()
        if outcome is not None:
            raise self.abandon(outcome, plan)
        if buffers.finish is not None:
            buffers.finish()
        return Work(None, str(call.operation), buffers.kept, results=buffers.written) if async_op is None else None

    def prepare(self, plan: CallPlan) -> _core.PreparedCall | None:
        """Prepares the planned call for repetition; returns None if the engine cannot prepare calls.

        The prepared call uses the buffers at their current addresses and does not copy results back. If the group's
        `wire` applies to the call, the prepared call maintains its own error feedback.
        """
        if self._closed:
            raise self.closed_error()
        call, buffers = plan if self.wire is None else self._rounded(plan, Wire(self.wire))
        return self._channel_of(call, buffers).prepare(call)

    def _rounded(self, plan: CallPlan, wire: WireLike) -> CallPlan:
        """Applies the group's `wire` to a plan that sums many floats on the CPU and does not specify a `wire`."""
        call, buffers = plan
        is_rounded = (
            not call.wire
            and call.operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
            and call.count >= _LEAST_ROUNDED
            and is_quantizable(call)
            and all(tensor.is_cpu for tensor in buffers.kept)
        )
        return with_wire(plan, wire, self.size()) if is_rounded else plan

    def recording(self, call: str, tensors: Sequence[torch.Tensor]) -> ProfiledCall:
        """Begins an event for a call in the current profile."""
        return ProfiledCall(f"{self.profiled_as}:{call}", tensors)

    def work_of(self, pending: PendingCall, plan: CallPlan) -> Work:
        """Returns the `Work` for a planned call that has been submitted."""
        call, buffers = plan
        written = self.written_by(plan)
        count_writes(written)  # repeated when the call ends, since autograd may save a tensor in between
        return Work(
            pending,
            str(call.operation),
            buffers.kept,
            buffers.finish,
            lambda outcome: self.abandon(outcome, plan),
            buffers.written,
            written,
        )

    def written_by(self, plan: CallPlan) -> Sequence[torch.Tensor]:
        """Returns the tensors to which a call writes."""
        call, buffers = plan
        return () if call.operation is Operation.BROADCAST and call.root == self._rank else buffers.written

    def limit_ns(self, timeout: Timeout | None) -> int:
        """Returns the time, in nanoseconds, for which a call with this `timeout` waits."""
        return self.timeout_ns if timeout is None else to_nanoseconds(timeout)

    def _channel_of(self, call: CollectiveCall, buffers: Buffers) -> EngineChannel:
        channel = self._devices.of(buffers.kept, call.operation).channel
        if call.wire and not channel.quantizes:
            raise ValueError(
                f"rank {self.me.rank}: wire={WIRES[call.wire - 1]!r} needs CPU tensors and the engine 'paceline', also "
                f"between the hosts; this group's backend is {self.backend!r}. Leave wire out, or create the group "
                "with backend='paceline' and without between_hosts"
            )
        return channel

    def _pass(
        self,
        name: Literal["send", "recv"],
        tensors: list[torch.Tensor],
        peer: int,
        tag: int,
        background: bool,
        timeout: Timeout | None,
    ) -> Work:
        """Starts a message, and waits for it unless `background` is true."""
        if self._closed:
            raise self.closed_error()
        if name == "send" or peer != ANY_SOURCE:
            self.rank_map.require_peer(peer, name, "dst" if name == "send" else "src")
        checked_tag(tag, name)
        code = dtype_code(tensors, name)
        buffers = Buffers()
        pieces = buffers.read(tensors) if name == "send" else buffers.write(tensors)
        shown = "recvAnySource" if peer < 0 else name
        recording = self.recording(shown, tensors) if profiler._is_profiler_enabled else None
        opened = self._devices.of(tensors, name)
        messages = opened.messages
        channel = opened.channel.inner if isinstance(opened.channel, StagedChannel) else opened.channel
        lost = MESSAGES_LOST if isinstance(channel, _core.HostGroup) else GROUP_LOST
        start = messages.send if name == "send" else messages.receive
        count_writes(buffers.written)
        message = start(peer, tag, code, pieces, self.limit_ns(timeout), background)
        other_end = "from any rank" if peer < 0 else f"{'to' if name == 'send' else 'from'} rank {self.ranks[peer]}"
        call = f"{name}({dtype_name(code)}, {count_elements(tensors)} elements, {other_end}, tag {tag})"

        work = Work(
            message,
            name,
            buffers.kept,
            buffers.finish,
            lambda outcome: self._failed(outcome, call, lost),
            tensors,
            buffers.written,
        )
        if background:
            if recording is not None:
                recording.end_with(work)
            return work
        try:
            work.wait()
        finally:
            if recording is not None:
                recording.end()
        return work

    def abandon(self, outcome: CallOutcome, plan: CallPlan) -> CollectiveError:
        """Returns the error for a failed call. After a timeout, retains buffers that a library may still use."""
        call, buffers = plan
        if outcome.code == OutcomeCode.TIMED_OUT and not self._abandoned:
            self._abandoned.append(buffers)
        count = call.count
        if call.operation is Operation.ALL_TO_ALL:  # element counts may differ between ranks
            count = sum(sum(pieces[1::2]) for pieces in call.inputs) // ITEM_SIZES[call.dtype]
        error = self._error(outcome, (0, call.operation, call.dtype, call.reduce_op, call.root, count))
        if buffers.note and isinstance(error, CollectiveMismatchError):
            error.args = (f"{buffers.note}: {error}", *error.args[1:])
        return error

    def _abandon(self, outcome: CallOutcome, call: CollectiveCall, kept: Sequence[object]) -> CollectiveError:
        buffers = Buffers()
        buffers.kept += [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]
        return self.abandon(outcome, (call, buffers))

    def _error(self, outcome: CallOutcome, header: HeaderFields) -> CollectiveError:
        return self._failed(outcome, describe_call(header).rsplit(" as call", 1)[0])

    def _failed(self, outcome: CallOutcome, call: str, lost: str = GROUP_LOST) -> CollectiveError:
        error = to_error(outcome, self.rank_map.members, self._rank, call, lost, self._engine_members)
        if isinstance(error, CollectiveTimeoutError):
            # All ranks receive the same outcome, so `outcome.missing` includes this rank if it was late.
            error.missing = tuple(self.ranks[rank] for rank in outcome.missing if rank != self._rank)
        return error

    def closed_error(self) -> ValueError:
        """Returns the error for a call on a closed group."""
        return ValueError(f"rank {self.me.rank}: {self._closed_why}")


def _shown(plan: CallPlan) -> list[torch.Tensor]:
    """Returns the tensors to record in a profile: the inputs, or the tensors that the call modifies in place."""
    call, buffers = plan
    if buffers.profiled is not None:
        return buffers.profiled
    return buffers.kept[: sum(len(flat) // 2 for flat in call.inputs)] or buffers.kept


def _addresses(
    tensors: Sequence[object], dtype: torch.dtype, nbytes: int, parts: int, are_whole: bool
) -> list[int] | None:
    """Returns the addresses of the parts (`nbytes` bytes each), or None if a tensor is not plain or does not fit.

    The dtype must not be complex, because conjugate views are not detected.
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


def _as_work(work: Work | None) -> Work:
    """Returns `work`, or a finished `Work` if `work` is None, as for a call without tensors."""
    return Work(None, "a call without tensors") if work is None else work
