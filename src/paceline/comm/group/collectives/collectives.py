"""The public collectives on tensors, including barriers and the collectives with a root.

Every rank of a group makes the same calls in the same order. These rules apply to all calls:

- A tensor may be on any device for which the group's backend has an engine: the CPU always, CUDA with "nccl". All
  tensors of one call are on one device and of one dtype. A list of tensors may be passed for any tensor and is treated
  as their concatenation.
- `src` and `dst` are ranks of the default group, `group_src` and `group_dst` ranks of `group`; give one of the two.
- `group` is a Paceline group, or None for the default group. On a rank that is not in `group` a call does nothing and
  returns None.
- With `async_op=True` a call returns a `Work` at once, and its tensors must not be touched before the work is complete.
  Otherwise the call returns None when it is complete.
- Tensors that a call writes to count as modified in place: a backward pass that needs their earlier values raises.
- `timeout` is a timedelta or a number of seconds; None means the group's time-out.
- `wire` rounds floats that are summed, or moved by all_gather, when they are sent between hosts: to "bf16", "int8",
  "int4", or with a `Wire`, which compensates for the rounding in later calls (docs/slow-networks.md). Data within a
  host stays exact, and all ranks get the same bits.
- Under torch.compile each call breaks the graph.

All raise:
    TypeError: a tensor's device, layout or dtype is not supported, the reduction is not defined for its dtype, or
        `group` is not a Paceline group.
    CollectiveMismatchError: the ranks made different calls. Every rank raises this error, which names both calls. On
        one host the group remains usable.
    CollectiveTimeoutError: a rank did not make the call within `timeout`. The group can no longer be used.
    PeerLostError: a rank died or left. The group can no longer be used, and later calls raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.engine.adapters.device_streams import accelerator_in_use
from paceline.comm.engine.codes import ReduceOp, Reduction
from paceline.comm.group.buffers import Tensors
from paceline.comm.group.call_plan import parts_by_rank, root_rank, rows_by_rank
from paceline.comm.group.compression import WireLike
from paceline.comm.group.default import Group, resolve
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import JoinedWork, StreamWork, Work, join_works
from paceline.durations import Timeout
from paceline.errors import short_repr


@eager
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Waits until every rank of the group has called it.

    If the group has an engine for an accelerator, the barrier also waits for the earlier work on the current stream of
    this rank's device, as torch.distributed's nccl barrier does. When it returns, all ranks have therefore finished
    this work. With `async_op=True`, `wait` waits only for this rank's work.

    Args:
        group: the group; the default group if None.
        async_op: whether to return a `Work` at once.
        device_ids: the index of this rank's device, in a list; if None, the device of `init_process_group`, or else the
            current one. The indices have no effect in a group without an engine for an accelerator.
        timeout: the time to wait, as a timedelta or in seconds; the group's if None.

    Raises:
        TypeError: `device_ids` is not a list of integers.
    """
    if device_ids is not None and not (
        isinstance(device_ids, (list, tuple)) and all(type(index) is int for index in device_ids)
    ):
        raise TypeError(f"barrier: device_ids is {short_repr(device_ids)}; it must be a list of indices, such as [0]")
    chosen = resolve(group)
    if chosen is None:
        return None
    work_on_devices = [StreamWork(device) for device in _devices_in_use(chosen, device_ids)]
    if async_op and work_on_devices:
        return JoinedWork([*work_on_devices, *filter(None, [chosen.barrier(True, timeout)])], "barrier", [])
    for work in work_on_devices:
        work.wait(timeout)
    return chosen.barrier(async_op, timeout)


def _devices_in_use(group: ProcessGroup, indices: Sequence[int] | None) -> list[torch.device]:
    """Returns the group's accelerators with these indices, by default this rank's; empty if it has not used any."""
    if group.device_types == {"cpu"}:
        return []
    accelerator = accelerator_in_use()
    if accelerator is None or accelerator.type not in group.device_types:
        return []
    if indices is not None:
        return [torch.device(accelerator.type, index) for index in indices]
    return [group.bound_device_id or torch.device(accelerator.type, torch.accelerator.current_device_index())]


@eager
def monitored_barrier(group: Group = None, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
    """Waits until every rank of the group has called it; the error of a time-out names the ranks that have not.

    All waiting ranks raise the error, not only rank 0 as in torch.distributed. The errors of all Paceline calls name
    the missing ranks; the message of this one begins with them.

    Args:
        group: the group; the default group if None.
        timeout: the time to wait, as a timedelta or in seconds; the group's time-out if None.
        wait_all_ranks: whether to name all missing ranks rather than the first one and the number of others.

    Raises:
        CollectiveTimeoutError: ranks are missing; its `missing` lists them all. The group can no longer be used.
        PeerLostError: a rank died or left. The group can no longer be used.
    """
    chosen = resolve(group)
    if chosen is not None:
        chosen.monitored_barrier(timeout, wait_all_ranks)


@eager
def broadcast(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies the source's `tensor` into the `tensor` of every other rank.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank; read on the source, written elsewhere.
        src, group_src: the source.

    Raises:
        ValueError: the source is missing, given twice, or not in the group.
    """
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
    """Reduces `tensor` over all ranks into the destination's `tensor`. The tensors of other ranks do not change.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank.
        dst, group_dst: the destination.
        op: the reduction. The default is SUM.

    Raises:
        ValueError: the destination is missing, given twice, or not in the group.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    return chosen.reduce(tensor, root_rank(chosen, dst, group_dst, "reduce", "dst"), op, async_op, timeout)


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
    """Copies every rank's `tensor` to the destination, rank r's `tensor` into `gather_list[r]`.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank.
        gather_list: a list with a tensor like `tensor` for each rank on the destination; None or empty elsewhere.
        dst, group_dst: the destination. The default is the first rank of the group.

    Raises:
        ValueError: `gather_list` is missing or has the wrong size on the destination, or is given on another rank.
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
    """Copies the source's `scatter_list[r]` into the `tensor` of rank r.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank.
        scatter_list: a list with a tensor like `tensor` for each rank on the source; None or empty elsewhere.
        src, group_src: the source. The default is the first rank of the group.

    Raises:
        ValueError: `scatter_list` is missing or has the wrong size on the source, or is given on another rank.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    return chosen.scatter(
        tensor, scatter_list, root_rank(chosen, src, group_src, "scatter", "src", 0), async_op, timeout
    )


@eager
def all_reduce(
    tensor: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> Work | None:
    """Reduces `tensor` over all ranks, in place.

    With the engine "paceline" every rank gets the same bits, in every run. The order of summation depends on the
    algorithm, the number of elements and the ranks, and never on the order in which ranks arrive: on one host it is a
    pairwise tree in rank order. Other engines sum in the order of their library. float16 and bfloat16 are accumulated
    in float32.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank, dense or sparse COO. A sparse tensor is
            coalesced afterwards. The call for it returns only when all ranks have made the call, even with
            `async_op=True`, since the ranks first exchange their numbers of values.
        op: the reduction: a `ReduceOp`, a `PremulSum`, or torch's. The default is SUM.
        group, async_op, timeout, wire: see the rules in the module's docstring.
    """
    chosen = resolve(group)
    return None if chosen is None else chosen.all_reduce(tensor, op, async_op, timeout, False, wire)


@eager
def all_gather(
    tensor_list: Sequence[Tensors],
    tensor: Tensors,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> Work | None:
    """Copies every rank's `tensor` to all ranks, rank r's `tensor` into `tensor_list[r]`.

    Args:
        tensor_list: a list of one tensor for each rank, with the dtype and number of elements of `tensor`.
        tensor: a tensor of the same dtype and number of elements on every rank.

    Raises:
        ValueError: `tensor_list` does not have one entry for each rank, or an entry has a different number of elements.
    """
    chosen = resolve(group)
    return None if chosen is None else chosen.all_gather(tensor_list, tensor, async_op, timeout, wire)


@eager
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> Work | None:
    """Copies every rank's `input_tensor` into `output_tensor` on all ranks, concatenated in rank order.

    Args:
        output_tensor: a contiguous tensor of any shape with `world_size` times as many elements as `input_tensor`.
        input_tensor: a tensor of the same dtype and number of elements on every rank.

    Raises:
        ValueError: `output_tensor` has a different number of elements, or is not contiguous.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    if async_op is False and timeout is None and chosen.try_fast_all_gather(output_tensor, input_tensor):
        return None
    parts = parts_by_rank(output_tensor, input_tensor.numel(), chosen, "all_gather_into_tensor", "output_tensor")
    work = chosen.all_gather(parts, input_tensor, async_op, timeout, wire)
    return join_works([work], "all_gather_into_tensor", [output_tensor])


@eager
def all_gather_single(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> Work | None:
    """Alias of `all_gather_into_tensor` with its name in torch 2.13."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op, timeout, wire)


@eager
def reduce_scatter(
    output: Tensors,
    input_list: Sequence[Tensors],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> Work | None:
    """Reduces the ranks' `input_list[r]` into the `output` of rank r.

    Args:
        output: a tensor of the same dtype and number of elements on every rank.
        input_list: a list of one tensor for each rank, with the dtype and number of elements of `output`.
        op: the reduction. The default is SUM.

    Raises:
        ValueError: `input_list` does not have one entry for each rank, or an entry has a different number of elements.
    """
    chosen = resolve(group)
    return None if chosen is None else chosen.reduce_scatter(output, input_list, op, async_op, timeout, wire)


@eager
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> Work | None:
    """Reduces `input` over all ranks and writes each rank's part of the result to its `output`.

    Args:
        output: a tensor of the same dtype and number of elements on every rank.
        input: a contiguous tensor of any shape with `world_size` times as many elements as `output`: the parts for all
            ranks, concatenated in rank order.
        op: the reduction. The default is SUM.

    Raises:
        ValueError: `input` has a different number of elements, or is not contiguous.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    if async_op is False and timeout is None and chosen.try_fast_reduce_scatter(output, input, op):
        return None
    parts = parts_by_rank(input, output.numel(), chosen, "reduce_scatter_tensor", "input")
    return chosen.reduce_scatter(output, parts, op, async_op, timeout, wire)


@eager
def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
    wire: WireLike = None,
) -> Work | None:
    """Alias of `reduce_scatter_tensor` with its name in torch 2.13."""
    return reduce_scatter_tensor(output, input, op, group, async_op, timeout, wire)


@eager
def all_to_all(
    output_tensor_list: Sequence[Tensors],
    input_tensor_list: Sequence[Tensors],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies a tensor from each rank to each rank: rank s's `input_tensor_list[r]` to rank r's `output_tensor_list[s]`.

    Args:
        output_tensor_list, input_tensor_list: lists of one tensor for each rank, all of the same dtype. Sizes may
            differ between pairs of ranks; if a sender and a receiver disagree, every rank raises
            `CollectiveMismatchError`.

    Raises:
        ValueError: a list does not have one entry for each rank, or the two entries for this rank itself differ in
            size.
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
    """Copies rows of `input` to each rank, and rows from each rank into `output`, both in rank order.

    Args:
        output, input: tensors of the same dtype, which are divided among the ranks along the first dimension.
        output_split_sizes, input_split_sizes: the numbers of rows from and to each rank; with None or an empty list,
            the rows are divided evenly.

    Raises:
        ValueError: the split sizes do not add up to the number of rows, or the rows cannot be divided evenly.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    is_even = not (output_split_sizes or input_split_sizes)
    if is_even and async_op is False and timeout is None and chosen.try_fast_all_to_all(output, input):
        return None
    outputs = rows_by_rank(output, output_split_sizes or None, chosen, "all_to_all_single", "output")
    inputs = rows_by_rank(input, input_split_sizes or None, chosen, "all_to_all_single", "input")
    return join_works([chosen.all_to_all(outputs, inputs, async_op, timeout)], "all_to_all_single", [output])


def explain(operation: str, nbytes: int, group: Group = None) -> str:
    """Returns a printable table of the algorithm that `group` uses for a call and the times of the alternatives.

    Args:
        operation: the name of a collective, such as "all_reduce".
        nbytes: the number of bytes in a rank's longest buffer, which is the tensor or all parts of a gather or scatter.

    Raises:
        ValueError: there is no such operation, or this rank is not in the group.
    """
    chosen = resolve(group)
    if chosen is None:
        raise ValueError("explain: this rank is not in the group")
    return chosen.explain(operation, nbytes)
