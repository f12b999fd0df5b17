"""Persistent collectives and messages, which are prepared once and executed many times, like MPI's persistent requests.

`call = all_reduce_init(tensor)` checks the arguments and chooses the algorithm once; `call()` then performs
`all_reduce(tensor)` with less overhead. The functions take the same arguments as the plain calls, and follow the rules
in the docstring of `collectives.py`. On a rank that is not in the group, the persistent call does nothing.

The engine "paceline" can prepare a collective whose tensors are dense, contiguous and on the CPU. In all other cases,
including messages, a persistent call executes the plain call each time.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.comm.engine.channel import CallOutcome, ReduceOp, Reduction
from paceline.comm.group.buffers import Tensors, as_list, count_writes, memory_layout, require_tensors
from paceline.comm.group.call_plan import (
    CallPlan,
    are_uneven,
    checked_tag,
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
    rows_by_rank,
    split_sizes,
)
from paceline.comm.group.collectives.point_to_point import peer_rank
from paceline.comm.group.compression import Wire, WireLike, with_wire
from paceline.comm.group.default import Group, resolve
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import ProfiledCall, Work
from paceline.durations import Timeout, to_nanoseconds


class PersistentCall(_core.FastPathCall):
    """A prepared call, returned for example by `all_reduce_init`, that can be executed any number of times.

    `call()` executes the call and returns when it is complete. `call.start()` only starts it; `call.wait()` then waits
    for its completion, and `call.test()` polls for it. Before completion, the tensors must not be accessed and the call
    cannot be started again. Each start counts as one call on the group, which other ranks may make as a plain or a
    persistent call; all ranks must make a group's calls in the same order. Preparing a call involves no other rank, and
    calls may be prepared in any order.

    The tensors must keep their memory and layout; their values may change between calls. A persistent call becomes
    invalid when its group is destroyed. In an elastic job, each view has its own group.

    Raises:
        ValueError: the memory, shape, strides or dtype of a tensor has changed; the call is already in progress, or has
            not been started; or its group has been destroyed.
        CollectiveError: the call failed; the error is the same as for the plain call.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._name = name
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._memory = [(tensor, memory_layout(tensor)) for tensor in dense]
        self._work: Work | None = None  # the work from the latest start, until `wait` returns
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        return f"PersistentCall({self._name}, {'started' if self.is_started else 'not started'})"

    @abstractmethod
    def _call_slow_path(self) -> None:
        """Executes the call; invoked by the core if its own fast path does not apply."""

    @abstractmethod
    def _submit(self) -> Work:
        """Starts the call in the background."""

    def _who(self) -> str:
        """Returns the prefix of error messages, which identifies this rank."""
        return ""

    @eager
    def start(self) -> None:
        """Starts the call and returns immediately."""
        self._require_memory()
        with self._starting:
            self._require_idle()
            self._work = self._submit()
            self.is_started = True

    @eager
    def wait(self, timeout: Timeout | None = None) -> None:
        """Waits until the started call is complete and its tensors are ready.

        Args:
            timeout: the time to wait, as a timedelta or in seconds. On expiry the call continues, and `wait` may be
                called again. If None, only the call's own timeout applies.
        """
        work = self._started_work()
        try:
            work.wait(timeout)
        except Exception:
            if work.is_completed():
                self.is_started, self._work = False, None
            raise
        self.is_started, self._work = False, None  # on a device, the call may still be running; the next one waits

    @eager
    def test(self) -> bool:
        """Returns True if the started call is complete; raises the call's error if it failed. Does not block.

        Once it has returned True, the call can be started again; calling `wait` is then unnecessary but harmless.
        """
        work = self._started_work()
        if not work.is_completed():
            return False
        self.is_started = False
        return work.wait()

    def _require_idle(self) -> None:
        if self.is_started:
            raise ValueError(
                f"{self._who()}{self._name}: this persistent call was started and has not completed; call wait(), or "
                "test() until it returns True, before the next start"
            )

    def _started_work(self) -> Work:
        work = self._work
        if work is None:
            raise ValueError(
                f"{self._who()}{self._name}: this persistent call has not been started since the last wait(); call "
                "start() first, or the object itself, which starts and waits"
            )
        return work

    def _require_memory(self) -> None:
        for tensor, layout in self._memory:
            if memory_layout(tensor) != layout:
                raise self._moved()

    def _moved(self) -> ValueError:
        return ValueError(
            f"{self._who()}{self._name}: a tensor of this persistent call has been moved, or has a different shape, "
            f"strides or type than at {self._name}_init; resize_, set_ and assignments to .data do this. Prepare the "
            "call again, or write new values into the old memory with copy_"
        )


class _Limits(NamedTuple):
    timeout_ns: int


class EngineCall(PersistentCall):
    """A persistent call prepared by the engine, which uses the group's current timeout unless `timeout` is given.

    The buffers of `plan` must not contain copies.
    """

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        plan: CallPlan,
        prepared: _core.PreparedCall,
        tensors: Sequence[torch.Tensor],
        timeout: Timeout | None,
    ) -> None:
        super().__init__(name, tensors)
        self._group = group
        self._plan = plan
        # Aliases of the tensors keep their memory alive even if the program assigns other memory to its tensors.
        plan[1].kept = [tensor.detach() for tensor in plan[1].kept]
        self._prepared = prepared
        self._limits: ProcessGroup | _Limits = group if timeout is None else _Limits(to_nanoseconds(timeout))
        self._written = group.written_by(plan)
        self.arm(
            prepared,
            self._memory,
            memory_layout,
            self._limits,
            profiler.__dict__,
            "_is_profiler_enabled",
            count_writes,
            tuple(self._written),
        )

    def _call_slow_path(self) -> None:
        self._require_memory()
        self._require_idle()
        recording = self._recording() if profiler._is_profiler_enabled else None
        count_writes(self._written)
        try:
            outcome = self._prepared.run(self._limits.timeout_ns)
        except ValueError as error:
            raise self._refused(error) from None
        finally:
            if recording is not None:
                recording.end()
        if outcome is not None:
            self._fail(outcome)

    def _fail(self, outcome: CallOutcome) -> NoReturn:
        raise self._group.abandon(outcome, self._plan)

    def _submit(self) -> Work:
        recording = self._recording() if profiler._is_profiler_enabled else None
        try:
            pending = self._prepared.submit(self._limits.timeout_ns)
        except ValueError as error:
            raise self._refused(error) from None
        work = self._group.work_of(pending, self._plan)
        if recording is not None:
            recording.end_with(work)
        return work

    def _recording(self) -> ProfiledCall:
        return self._group.recording(str(self._plan[0].operation), self._plan[1].kept)

    def _who(self) -> str:
        return f"rank {self._group.me.rank}: "

    def _refused(self, error: ValueError) -> ValueError:
        """Returns the error to raise for a call that the engine rejected with `error`."""
        if not self._group.is_closed:
            return ValueError(f"{self._who()}{self._name}: {error}")
        return ValueError(
            f"{self._group.closed_error()}. {self._name}_init prepared this call for the group that has ended; prepare "
            "it again"
        )


class RepeatedCall(PersistentCall):
    """A persistent call that executes the plain call `make(async_op=...)`, for calls that the engine cannot prepare."""

    def __init__(self, name: str, make: Callable[..., Work | None], tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(name, tensors)
        self._make = make

    @eager
    def _call_slow_path(self) -> None:
        self._require_memory()
        self._require_idle()
        self._make(async_op=False)

    def _submit(self) -> Work:
        work = self._make(async_op=True)
        return Work(None, self._name) if work is None else work


def prepared_call(
    name: str,
    group: ProcessGroup,
    plan: CallPlan,
    make: Callable[..., Work | None],
    tensors: Sequence[torch.Tensor],
    timeout: Timeout | None,
) -> PersistentCall:
    """Returns the planned call prepared by the group's engine or, if this is impossible, a call that invokes `make`."""
    prepared = None if plan[1].has_copies else group.prepare(plan)
    if prepared is None:
        return RepeatedCall(name, make, tensors)
    return EngineCall(name, group, plan, prepared, tensors, timeout)


def no_op_call(name: str) -> PersistentCall:
    """Returns a persistent call that does nothing, for a rank that is not in the group."""
    return RepeatedCall(name, lambda async_op: None)


def all_tensors(many: Iterable[Tensors]) -> list[torch.Tensor]:
    """Flattens tensors and lists of tensors into one list."""
    return [tensor for tensors in many for tensor in as_list(tensors, "tensors")]


def all_reduce_init(
    tensor: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> PersistentCall:
    """Returns a persistent `all_reduce`. With a `wire`, each call compensates for the rounding in the previous one."""
    chosen = resolve(group, "all_reduce_init")
    if chosen is None:
        return no_op_call("all_reduce")
    listed = as_list(tensor, "all_reduce")
    feedback = wire if wire is None or isinstance(wire, Wire) else Wire(wire)
    make = partial(chosen.all_reduce, tensor, op, timeout=timeout, wire=feedback)
    if any(member.layout is not torch.strided for member in listed):
        return RepeatedCall("all_reduce", make, listed)
    plan = with_wire(plan_all_reduce(listed, op, chosen.timeout_ns), feedback, chosen.size())
    return prepared_call("all_reduce", chosen, plan, make, listed, timeout)


def all_gather_init(
    tensor_list: Sequence[Tensors], tensor: Tensors, group: Group = None, timeout: Timeout | None = None
) -> PersistentCall:
    """Returns a persistent `all_gather`."""
    chosen = resolve(group, "all_gather_init")
    if chosen is None:
        return no_op_call("all_gather")
    plan = plan_all_gather(chosen.rank_map, tensor_list, tensor, chosen.timeout_ns)
    make = partial(chosen.all_gather, tensor_list, tensor, timeout=timeout)
    return prepared_call("all_gather", chosen, plan, make, all_tensors([*tensor_list, tensor]), timeout)


def all_gather_into_tensor_init(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, timeout: Timeout | None = None
) -> PersistentCall:
    """Returns a persistent `all_gather_into_tensor`."""
    chosen = resolve(group, "all_gather_into_tensor_init")
    if chosen is None:
        return no_op_call("all_gather_into_tensor")
    name = "all_gather_into_tensor"
    require_tensors(name, output_tensor=output_tensor, input_tensor=input_tensor)
    parts = parts_by_rank(output_tensor, input_tensor.numel(), chosen.rank_map, name, "output_tensor")
    plan = plan_all_gather(chosen.rank_map, parts, input_tensor, chosen.timeout_ns)
    make = partial(chosen.all_gather, parts, input_tensor, timeout=timeout)
    return prepared_call(name, chosen, plan, make, [output_tensor, input_tensor], timeout)


def reduce_scatter_init(
    output: Tensors,
    input_list: Sequence[Tensors],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `reduce_scatter`."""
    chosen = resolve(group, "reduce_scatter_init")
    if chosen is None:
        return no_op_call("reduce_scatter")
    make = partial(chosen.reduce_scatter, output, input_list, op, timeout=timeout)
    tensors = all_tensors([output, *input_list])
    if are_uneven(input_list, chosen.rank_map, "reduce_scatter"):
        return RepeatedCall("reduce_scatter", make, tensors)
    plan = plan_reduce_scatter(chosen.rank_map, output, input_list, op, chosen.timeout_ns)
    return prepared_call("reduce_scatter", chosen, plan, make, tensors, timeout)


def reduce_scatter_tensor_init(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `reduce_scatter_tensor`."""
    chosen = resolve(group, "reduce_scatter_tensor_init")
    if chosen is None:
        return no_op_call("reduce_scatter_tensor")
    name = "reduce_scatter_tensor"
    require_tensors(name, output=output, input=input)
    parts = parts_by_rank(input, output.numel(), chosen.rank_map, name, "input")
    plan = plan_reduce_scatter(chosen.rank_map, output, parts, op, chosen.timeout_ns)
    make = partial(chosen.reduce_scatter, output, parts, op, timeout=timeout)
    return prepared_call(name, chosen, plan, make, [output, input], timeout)


def all_to_all_init(
    output_tensor_list: Sequence[Tensors],
    input_tensor_list: Sequence[Tensors],
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `all_to_all`."""
    chosen = resolve(group, "all_to_all_init")
    if chosen is None:
        return no_op_call("all_to_all")
    plan = plan_all_to_all(chosen.rank_map, output_tensor_list, input_tensor_list, chosen.timeout_ns)
    make = partial(chosen.all_to_all, output_tensor_list, input_tensor_list, timeout=timeout)
    tensors = all_tensors([*output_tensor_list, *input_tensor_list])
    return prepared_call("all_to_all", chosen, plan, make, tensors, timeout)


def all_to_all_single_init(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `all_to_all_single`."""
    chosen = resolve(group, "all_to_all_single_init")
    if chosen is None:
        return no_op_call("all_to_all_single")
    name = "all_to_all_single"
    require_tensors(name, output=output, input=input)
    received = split_sizes(output_split_sizes, name, "output_split_sizes")
    sent = split_sizes(input_split_sizes, name, "input_split_sizes")
    outputs = rows_by_rank(output, received, chosen.rank_map, name, "output")
    inputs = rows_by_rank(input, sent, chosen.rank_map, name, "input")
    plan = plan_all_to_all(chosen.rank_map, outputs, inputs, chosen.timeout_ns)
    make = partial(chosen.all_to_all, outputs, inputs, timeout=timeout)
    return prepared_call(name, chosen, plan, make, [output, input], timeout)


def barrier_init(group: Group = None, timeout: Timeout | None = None) -> PersistentCall:
    """Returns a persistent `barrier`."""
    chosen = resolve(group, "barrier_init")
    if chosen is None:
        return no_op_call("barrier")
    make = partial(chosen.barrier, timeout=timeout)
    return prepared_call("barrier", chosen, plan_barrier(chosen.timeout_ns), make, [], timeout)


def broadcast_init(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `broadcast`."""
    chosen = resolve(group, "broadcast_init")
    if chosen is None:
        return no_op_call("broadcast")
    root = chosen.rank_map.root_rank(src, group_src, "broadcast", "src")
    plan = plan_broadcast(chosen.rank_map, tensor, root, chosen.timeout_ns)
    make = partial(chosen.broadcast, tensor, root, timeout=timeout)
    return prepared_call("broadcast", chosen, plan, make, all_tensors([tensor]), timeout)


def reduce_init(
    tensor: Tensors,
    dst: int | None = None,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `reduce`."""
    chosen = resolve(group, "reduce_init")
    if chosen is None:
        return no_op_call("reduce")
    root = chosen.rank_map.root_rank(dst, group_dst, "reduce", "dst")
    plan = plan_reduce(chosen.rank_map, tensor, root, op, chosen.timeout_ns)
    make = partial(chosen.reduce, tensor, root, op, timeout=timeout)
    return prepared_call("reduce", chosen, plan, make, all_tensors([tensor]), timeout)


def gather_init(
    tensor: Tensors,
    gather_list: Sequence[Tensors] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `gather`."""
    chosen = resolve(group, "gather_init")
    if chosen is None:
        return no_op_call("gather")
    root = chosen.rank_map.root_rank(dst, group_dst, "gather", "dst", 0)
    plan = plan_gather(chosen.rank_map, gather_list, tensor, root, chosen.timeout_ns)
    make = partial(chosen.gather, gather_list, tensor, root, timeout=timeout)
    return prepared_call("gather", chosen, plan, make, all_tensors([tensor, *(gather_list or [])]), timeout)


def scatter_init(
    tensor: Tensors,
    scatter_list: Sequence[Tensors] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `scatter`."""
    chosen = resolve(group, "scatter_init")
    if chosen is None:
        return no_op_call("scatter")
    root = chosen.rank_map.root_rank(src, group_src, "scatter", "src", 0)
    plan = plan_scatter(chosen.rank_map, tensor, scatter_list, root, chosen.timeout_ns)
    make = partial(chosen.scatter, tensor, scatter_list, root, timeout=timeout)
    return prepared_call("scatter", chosen, plan, make, all_tensors([tensor, *(scatter_list or [])]), timeout)


def send_init(
    tensor: Tensors,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `send`."""
    chosen = resolve(group, "send_init")
    if chosen is None:
        return no_op_call("send")
    listed = as_list(tensor, "send")
    peer = peer_rank(chosen, dst, group_dst, "send", "dst")
    checked_tag(tag, "send")
    return RepeatedCall("send", partial(chosen.send, listed, peer, tag, timeout=timeout), listed)


def recv_init(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `recv`; the source must be specified."""
    chosen = resolve(group, "recv_init")
    if chosen is None:
        return no_op_call("recv")
    listed = as_list(tensor, "recv")
    peer = peer_rank(chosen, src, group_src, "recv", "src")
    checked_tag(tag, "recv")
    return RepeatedCall("recv", partial(chosen.recv, listed, peer, tag, timeout=timeout), listed)
