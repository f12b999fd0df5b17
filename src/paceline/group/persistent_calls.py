"""Persistent forms of the collectives; those with a root, and those of messages, are in `persistent_rooted.py`.

`call = all_reduce_init(tensor)` checks the arguments and chooses the algorithm once; then `call()` does what
`all_reduce(tensor)` does, and costs less. `PersistentCall` says what else it can do, and what it asks of the tensors.
The arguments are those of the plain calls, and the rules at the head of `collectives.py` hold. On a rank that is not in
the group, the persistent call does nothing.

The engine "paceline" prepares a call whose tensors are dense, contiguous and on the CPU. With other engines and other
tensors, and for messages, a persistent call makes the plain call each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.durations import Timeout
from paceline.group.arguments import parts_by_rank, rows_by_rank
from paceline.group.buffers import Tensors, as_list
from paceline.group.default import Group, resolve
from paceline.group.persistent import PersistentCall, RepeatedCall, all_tensors, nothing, prepared_call
from paceline.group.planning import plan_all_gather, plan_all_reduce, plan_all_to_all, plan_barrier, plan_reduce_scatter
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.wire import Wire, WireLike, with_wire
from paceline.group.work import Work


def all_reduce_init(
    tensor: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> PersistentCall:
    """Returns a persistent `all_reduce`; what it loses by a `wire` it makes up for in its next call."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("all_reduce")
    listed = as_list(tensor, "all_reduce")
    feedback = wire if wire is None or isinstance(wire, Wire) else Wire(wire)

    def make(async_op: bool) -> Work | None:
        return chosen.all_reduce(tensor, op, async_op, timeout, wire=feedback)

    if any(each.layout is not torch.strided for each in listed):
        return RepeatedCall("all_reduce", make, listed)
    plan = with_wire(plan_all_reduce(listed, op, chosen.timeout_ns), feedback, chosen.size())
    return prepared_call("all_reduce", chosen, plan, make, listed, timeout)


def all_gather_init(
    tensor_list: Sequence[Tensors], tensor: Tensors, group: Group = None, timeout: Timeout | None = None
) -> PersistentCall:
    """Returns a persistent `all_gather`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("all_gather")
    return _all_gather("all_gather", chosen, tensor_list, tensor, timeout)


def all_gather_into_tensor_init(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, timeout: Timeout | None = None
) -> PersistentCall:
    """Returns a persistent `all_gather_into_tensor`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("all_gather_into_tensor")
    name = "all_gather_into_tensor"
    parts = parts_by_rank(output_tensor, input_tensor.numel(), chosen, name, "output_tensor")
    return _all_gather(name, chosen, parts, input_tensor, timeout, output_tensor)


def _all_gather(
    name: str,
    group: ProcessGroup,
    outputs: Sequence[Tensors],
    tensor: Tensors,
    timeout: Timeout | None,
    *whole: torch.Tensor,
) -> PersistentCall:
    plan = plan_all_gather(group, outputs, tensor, group.timeout_ns)

    def make(async_op: bool) -> Work | None:
        return group.all_gather(outputs, tensor, async_op, timeout)

    return prepared_call(name, group, plan, make, [*whole, *all_tensors([*outputs, tensor])], timeout)


def reduce_scatter_init(
    output: Tensors,
    input_list: Sequence[Tensors],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `reduce_scatter`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("reduce_scatter")
    return _reduce_scatter("reduce_scatter", chosen, output, input_list, op, timeout)


def reduce_scatter_tensor_init(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `reduce_scatter_tensor`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("reduce_scatter_tensor")
    parts = parts_by_rank(input, output.numel(), chosen, "reduce_scatter_tensor", "input")
    return _reduce_scatter("reduce_scatter_tensor", chosen, output, parts, op, timeout, input)


def _reduce_scatter(
    name: str,
    group: ProcessGroup,
    output: Tensors,
    inputs: Sequence[Tensors],
    op: Reduction,
    timeout: Timeout | None,
    *whole: torch.Tensor,
) -> PersistentCall:
    plan = plan_reduce_scatter(group, output, inputs, op, group.timeout_ns)

    def make(async_op: bool) -> Work | None:
        return group.reduce_scatter(output, inputs, op, async_op, timeout)

    return prepared_call(name, group, plan, make, [*whole, *all_tensors([output, *inputs])], timeout)


def all_to_all_init(
    output_tensor_list: Sequence[Tensors],
    input_tensor_list: Sequence[Tensors],
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `all_to_all`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("all_to_all")
    return _all_to_all("all_to_all", chosen, output_tensor_list, input_tensor_list, timeout)


def all_to_all_single_init(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    timeout: Timeout | None = None,
) -> PersistentCall:
    """Returns a persistent `all_to_all_single`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("all_to_all_single")
    outputs = rows_by_rank(output, output_split_sizes or None, chosen, "all_to_all_single", "output")
    inputs = rows_by_rank(input, input_split_sizes or None, chosen, "all_to_all_single", "input")
    return _all_to_all("all_to_all_single", chosen, outputs, inputs, timeout, output, input)


def _all_to_all(
    name: str,
    group: ProcessGroup,
    outputs: Sequence[Tensors],
    inputs: Sequence[Tensors],
    timeout: Timeout | None,
    *whole: torch.Tensor,
) -> PersistentCall:
    plan = plan_all_to_all(group, outputs, inputs, group.timeout_ns)

    def make(async_op: bool) -> Work | None:
        return group.all_to_all(outputs, inputs, async_op, timeout)

    return prepared_call(name, group, plan, make, [*whole, *all_tensors([*outputs, *inputs])], timeout)


def barrier_init(group: Group = None, timeout: Timeout | None = None) -> PersistentCall:
    """Returns a persistent `barrier`."""
    chosen = resolve(group)
    if chosen is None:
        return nothing("barrier")

    def make(async_op: bool) -> Work | None:
        return chosen.barrier(async_op, timeout)

    return prepared_call("barrier", chosen, plan_barrier(chosen.timeout_ns), make, [], timeout)
