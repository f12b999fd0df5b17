"""Checks the arguments of collectives, and describes each as a call of the engine.

All functions raise:
    TypeError: a tensor's layout or dtype is not supported, or the reduction is not defined for its dtype.
    ValueError: tensors do not fit together, or are missing, or are too many.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.channel import Call
from paceline.engine.codes import NO_REDUCTION
from paceline.group.arguments import lists_by_rank, require_counts
from paceline.group.base import BaseGroup
from paceline.group.buffers import Buffers, Tensors, as_list, count_elements, dtype_code
from paceline.group.reduce_op import Reduction
from paceline.group.reductions import checked_reduction
from paceline.schedule.steps import Operation

# A call, and the owner of its buffers, which copies results back that were written to a copy.
Plan = tuple[Call, Buffers]


def plan_all_reduce(tensors: Tensors, op: Reduction, timeout_ns: int, any_order: bool = False) -> Plan:
    """Returns the plan of an all_reduce; the argument `any_order` is that of `Buffers`."""
    listed = as_list(tensors, "all_reduce")
    code, reduce_code, buffers = checked_reduction(listed, op, "all_reduce", any_order)
    outputs = [buffers.write(listed)]
    return Call(Operation.ALL_REDUCE, code, reduce_code, -1, count_elements(listed), timeout_ns, [], outputs), buffers


def plan_broadcast(tensors: Tensors, root: int, timeout_ns: int, any_order: bool = False) -> Plan:
    """Returns the plan of a broadcast from group rank `root`; the argument `any_order` is that of `Buffers`."""
    listed = as_list(tensors, "broadcast")
    code = dtype_code(listed, "broadcast")
    buffers = Buffers(any_order=any_order)
    outputs = [buffers.write(listed)]
    count = count_elements(listed)
    return Call(Operation.BROADCAST, code, NO_REDUCTION, root, count, timeout_ns, [], outputs), buffers


def plan_reduce(group: BaseGroup, tensors: Tensors, root: int, op: Reduction, timeout_ns: int) -> Plan:
    """Returns the plan of a reduce to group rank `root`."""
    listed = as_list(tensors, "reduce")
    code, reduce_code, buffers = checked_reduction(listed, op, "reduce")
    root_or_copy = buffers.write if group.rank() == root else buffers.read
    outputs = [root_or_copy(listed)]
    return Call(Operation.REDUCE, code, reduce_code, root, count_elements(listed), timeout_ns, [], outputs), buffers


def plan_all_gather(group: BaseGroup, outputs: Sequence[Tensors], tensors: Tensors, timeout_ns: int) -> Plan:
    """Returns the plan of an all_gather."""
    return _plan_gather(Operation.ALL_GATHER, group, outputs, tensors, -1, timeout_ns)


def plan_gather(
    group: BaseGroup, outputs: Sequence[Tensors] | None, tensors: Tensors, root: int, timeout_ns: int
) -> Plan:
    """Returns the plan of a gather to group rank `root`; `outputs` is None or empty on other ranks."""
    if bool(outputs) != (group.rank() == root):
        raise ValueError(
            f"rank {group.me.rank}: gather takes gather_list on the destination, rank {group.ranks[root]}, "
            "and on no other rank"
        )
    return _plan_gather(Operation.GATHER, group, outputs or [], tensors, root, timeout_ns)


def _plan_gather(
    operation: Operation, group: BaseGroup, outputs: Sequence[Tensors], tensors: Tensors, root: int, timeout_ns: int
) -> Plan:
    name = str(operation)
    here = operation is Operation.ALL_GATHER or group.rank() == root
    read = as_list(tensors, name)
    written = lists_by_rank(outputs, group, name, "the list of outputs") if here else []
    code = dtype_code([*read, *(t for each in written for t in each)], name)
    count = count_elements(read)
    require_counts(written, count, group, name, "the list of outputs")
    buffers = Buffers()
    flat_inputs = [buffers.read(read)]
    flat_outputs = [buffers.write(each) for each in written]
    return Call(operation, code, NO_REDUCTION, root, count, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_reduce_scatter(
    group: BaseGroup, output: Tensors, inputs: Sequence[Tensors], op: Reduction, timeout_ns: int
) -> Plan:
    """Returns the plan of a reduce_scatter."""
    written = as_list(output, "reduce_scatter")
    read = lists_by_rank(inputs, group, "reduce_scatter", "input_list")
    code, reduce_code, buffers = checked_reduction(
        [*written, *(t for each in read for t in each)], op, "reduce_scatter"
    )
    count = count_elements(written)
    require_counts(read, count, group, "reduce_scatter", "input_list")
    flat_inputs = [buffers.read(each) for each in read]
    buffers.scale = None  # of what is read, not of the result
    flat_outputs = [buffers.write(written)]
    operation = Operation.REDUCE_SCATTER
    return Call(operation, code, reduce_code, -1, count, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_scatter(
    group: BaseGroup, output: Tensors, inputs: Sequence[Tensors] | None, root: int, timeout_ns: int
) -> Plan:
    """Returns the plan of a scatter from group rank `root`; `inputs` is None or empty on other ranks."""
    if bool(inputs) != (group.rank() == root):
        raise ValueError(
            f"rank {group.me.rank}: scatter takes scatter_list on the source, rank {group.ranks[root]}, "
            "and on no other rank"
        )
    written = as_list(output, "scatter")
    read = lists_by_rank(inputs, group, "scatter", "scatter_list") if inputs else []
    code = dtype_code([*written, *(t for each in read for t in each)], "scatter")
    count = count_elements(written)
    require_counts(read, count, group, "scatter", "scatter_list")
    buffers = Buffers()
    flat_inputs = [buffers.read(each) for each in read]
    flat_outputs = [buffers.write(written)]
    return Call(Operation.SCATTER, code, NO_REDUCTION, root, count, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_all_to_all(group: BaseGroup, outputs: Sequence[Tensors], inputs: Sequence[Tensors], timeout_ns: int) -> Plan:
    """Returns the plan of an all_to_all."""
    read = lists_by_rank(inputs, group, "all_to_all", "input_tensor_list")
    written = lists_by_rank(outputs, group, "all_to_all", "output_tensor_list")
    mine = group.rank()
    require_counts([written[mine]], count_elements(read[mine]), group, "all_to_all", "this rank's part for itself")
    code = dtype_code([t for each in (*read, *written) for t in each], "all_to_all")
    buffers = Buffers()
    flat_inputs = [buffers.read(each) for each in read]
    flat_outputs = [buffers.write(each) for each in written]
    return Call(Operation.ALL_TO_ALL, code, NO_REDUCTION, -1, 0, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_barrier(timeout_ns: int) -> Plan:
    """Returns the plan of a barrier."""
    return Call(Operation.BARRIER, 0, NO_REDUCTION, -1, 0, timeout_ns, [], []), Buffers()
