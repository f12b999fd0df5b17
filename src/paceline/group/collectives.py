"""The collectives as users call them.

Every rank of a group makes the same calls in the same order. `src`, `dst` and the like are ranks of the default group,
`group_src` and `group_dst` ranks of `group`. Wherever a tensor is taken, a list of tensors of one type is taken too, as
if they were one. With `async_op=True` a call returns a `Work` at once; without, None when it is done. A `timeout` is a
timedelta or a number of seconds. On a rank that is not in `group` a call does nothing and returns None.

All raise:
    TypeError: tensors that are not dense tensors of one supported type, or a reduction not defined for it.
    CollectiveMismatchError: the ranks made different calls; on every rank, naming both. The group stays usable.
    CollectiveTimeoutError: a rank did not come within `timeout` (default: the group's). The group is broken.
    PeerLostError: a rank died or left. The group is broken: later calls raise the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_compiling

from paceline.durations import Timeout
from paceline.group.arguments import parts_by_rank, root_rank, rows_by_rank
from paceline.group.buffers import Tensors
from paceline.group.default import Group, resolve
from paceline.group.eager import eager, outside
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.work import Work, ended
from paceline.schedule.steps import OPERATIONS, Operation


def all_reduce(
    tensor: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces `tensor` over all ranks, in place; afterwards it is bitwise the same on every rank.

    The order of summation is fixed by rank (a pairwise tree), so it is also the same from run to run. float16 and
    bfloat16 are accumulated in float32. A sparse COO tensor is coalesced afterwards; since the ranks must know first
    how many values each has, a call on one returns only when all ranks have made it, also with `async_op=True`.
    """
    if is_compiling():
        return outside(all_reduce, tensor, op, group, async_op, timeout)
    chosen = resolve(group)
    return None if chosen is None else chosen.all_reduce(tensor, op, async_op, timeout)


@eager
def broadcast(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies the source's `tensor` to all ranks."""
    chosen = resolve(group)
    if chosen is None:
        return None
    return chosen.broadcast(tensor, root_rank(chosen, src, group_src, "broadcast", "src"), async_op, timeout)


@eager
def reduce(
    tensor: Tensors,
    dst: int | None = None,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces `tensor` over all ranks into the destination's; on the other ranks it stays as it is."""
    chosen = resolve(group)
    if chosen is None:
        return None
    return chosen.reduce(tensor, root_rank(chosen, dst, group_dst, "reduce", "dst"), op, async_op, timeout)


@eager
def all_gather(
    tensor_list: Sequence[Tensors],
    tensor: Tensors,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies every rank's `tensor` to `tensor_list` of all ranks, by rank; all have the same number of elements."""
    chosen = resolve(group)
    return None if chosen is None else chosen.all_gather(tensor_list, tensor, async_op, timeout)


@eager
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies every rank's `input_tensor` into `output_tensor`, one behind the other by rank.

    `output_tensor` is contiguous and has `world_size` times as many elements, of any shape.

    Raises:
        ValueError: it has not.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    parts = parts_by_rank(output_tensor, input_tensor.numel(), chosen, "all_gather_into_tensor", "output_tensor")
    work = chosen.all_gather(parts, input_tensor, async_op, timeout)
    return ended([work], "all_gather_into_tensor", [output_tensor])


def all_gather_single(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """The name of `all_gather_into_tensor` in torch 2.13."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op, timeout)


@eager
def reduce_scatter(
    output: Tensors,
    input_list: Sequence[Tensors],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces the ranks' `input_list[r]` into rank r's `output`; all have the same number of elements."""
    chosen = resolve(group)
    return None if chosen is None else chosen.reduce_scatter(output, input_list, op, async_op, timeout)


@eager
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Like `reduce_scatter`, with the inputs one behind the other in the contiguous tensor `input`.

    Raises:
        ValueError: `input` does not have `world_size` times as many elements as `output`, or is not contiguous.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    parts = parts_by_rank(input, output.numel(), chosen, "reduce_scatter_tensor", "input")
    return chosen.reduce_scatter(output, parts, op, async_op, timeout)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """The name of `reduce_scatter_tensor` in torch 2.13."""
    return reduce_scatter_tensor(output, input, op, group, async_op, timeout)


@eager
def gather(
    tensor: Tensors,
    gather_list: Sequence[Tensors] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies every rank's `tensor` to `gather_list` of the destination (default: rank 0), by rank.

    Elsewhere `gather_list` is None or empty.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    return chosen.gather(gather_list, tensor, root_rank(chosen, dst, group_dst, "gather", "dst", 0), async_op, timeout)


@eager
def scatter(
    tensor: Tensors,
    scatter_list: Sequence[Tensors] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies `scatter_list[r]` of the source (default: rank 0) to rank r's `tensor`.

    Elsewhere `scatter_list` is None or empty.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    return chosen.scatter(
        tensor, scatter_list, root_rank(chosen, src, group_src, "scatter", "src", 0), async_op, timeout
    )


@eager
def all_to_all(
    output_tensor_list: Sequence[Tensors],
    input_tensor_list: Sequence[Tensors],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies `input_tensor_list[r]` to rank r, into the entry of its `output_tensor_list` that is this rank's.

    Sizes may differ from pair to pair; a pair that disagrees is a `CollectiveMismatchError` on every rank.
    """
    chosen = resolve(group)
    return None if chosen is None else chosen.all_to_all(output_tensor_list, input_tensor_list, async_op, timeout)


@eager
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Like `all_to_all`, with the parts one behind the other along the first dimension.

    The split sizes are numbers of rows, one a rank; None or an empty list splits evenly.

    Raises:
        ValueError: they do not add up to the number of rows, or that cannot be split evenly.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    outputs = rows_by_rank(output, output_split_sizes or None, chosen, "all_to_all_single", "output")
    inputs = rows_by_rank(input, input_split_sizes or None, chosen, "all_to_all_single", "input")
    return ended([chosen.all_to_all(outputs, inputs, async_op, timeout)], "all_to_all_single", [output])


@eager
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Returns when every rank of the group has called it. `device_ids` is for GPUs and must be None."""
    if device_ids is not None:
        raise ValueError("barrier: device_ids is for GPUs; the paceline engine works on CPU tensors, leave it out")
    chosen = resolve(group)
    return None if chosen is None else chosen.barrier(async_op, timeout)


def explain(operation: Operation, nbytes: int, group: Group = None) -> str:
    """Which algorithm `group` takes for a call, what the others would take, and why: a table to be printed.

    Args:
        operation: the name of a collective, such as "all_reduce".
        nbytes: the size of the longest buffer of a rank: the tensor, or all parts of a gather or scatter together.

    Raises:
        ValueError: there is no such operation, or this rank is not in the group.
    """
    chosen = resolve(group)
    if chosen is None:
        raise ValueError("explain: this rank is not in the group")
    if operation not in OPERATIONS:
        raise ValueError(f"explain: there is no operation {operation!r}; there are {', '.join(OPERATIONS)}")
    return chosen.explain(operation, nbytes)
