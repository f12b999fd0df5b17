"""Public collectives on tensors, including barriers and collectives with a root.

Every rank of a group makes the same calls in the same order. These rules apply to all calls:

- A tensor may be on any device for which the group's backend has an engine. There is always an engine for the CPU, and
  "nccl" is the engine for CUDA devices. All tensors of one call must be on the same device and have the same dtype. A
  list of tensors may be passed in place of any tensor, and is treated as the concatenation of these tensors.
- `src` and `dst` are ranks in the default group, and `group_src` and `group_dst` are ranks in `group`; pass either one.
- `group` is a Paceline group, or None for the default group. On a rank that is not in `group` a call does nothing and
  returns None.
- With `async_op=True` a call returns a `Work` immediately, and the call's tensors must not be accessed before the work
  is complete. With `async_op=False` (the default) the call returns None when it is complete.
- Tensors that a call writes count as modified in place, so a backward pass that needs their old values raises an error.
- `timeout` is a timedelta or a number of seconds; None means the group's timeout.
- `wire` is a format ("bf16", "int8" or "int4"), or a `Wire`, which also compensates for the rounding in later calls
  (docs/slow-networks.md). Floats are rounded to this format when they are sent between hosts in a sum or an all_gather.
  Data within a host stays exact, and the results are bitwise equal on all ranks.
- Under torch.compile, each call causes a graph break.

All raise:
    TypeError: a tensor's device, layout or dtype is not supported, the reduction is not defined for its dtype, or
        `group` is not a Paceline group.
    CollectiveMismatchError: the ranks made different calls. Every rank raises this error, which describes both calls.
        On one host the group remains usable.
    CollectiveTimeoutError: a rank did not make the call within `timeout`. The group can no longer be used.
    PeerLostError: a rank died or left. The group can no longer be used, and later calls raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.engine.adapters.device_streams import accelerator_in_use
from paceline.comm.engine.channel import ReduceOp, Reduction
from paceline.comm.group.buffers import Tensors, require_tensors
from paceline.comm.group.call_plan import parts_by_rank
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
    """Synchronizes all ranks: returns when every rank in the group has called it.

    If the group has an engine for an accelerator, the barrier also waits for earlier work on the current stream of this
    rank's device, like the nccl barrier of torch.distributed. When it returns, this work is therefore complete on all
    ranks. With `async_op=True`, `wait` waits only for this rank's work.

    Args:
        group: the group; the default group if None.
        async_op: whether to return a `Work` immediately.
        device_ids: a list with the index of this rank's device. The default is the device passed to
            `init_process_group` or, if none was passed, the current device. Ignored in a group without an engine for an
            accelerator.
        timeout: the time to wait, as a timedelta or in seconds; the group's timeout if None.

    Raises:
        TypeError: `device_ids` is not a list of integers.
    """
    if device_ids is not None and not (
        isinstance(device_ids, (list, tuple)) and all(type(index) is int for index in device_ids)
    ):
        raise TypeError(f"barrier: device_ids is {short_repr(device_ids)}; it must be a list of indices, such as [0]")
    chosen = resolve(group, "barrier")
    if chosen is None:
        return None
    work_on_devices = [StreamWork(device) for device in _devices_in_use(chosen, device_ids)]
    if async_op and work_on_devices:
        return JoinedWork([*work_on_devices, *filter(None, [chosen.barrier(True, timeout)])], "barrier", [])
    for work in work_on_devices:
        work.wait(timeout)
    return chosen.barrier(async_op, timeout)


def _devices_in_use(group: ProcessGroup, indices: Sequence[int] | None) -> list[torch.device]:
    """Returns the group's accelerators with these indices (default: those of this rank), or [] if none is in use."""
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
    """Synchronizes all ranks like `barrier`; on a timeout, the error lists the ranks that have not called it.

    All waiting ranks raise the error, not only rank 0 as in torch.distributed. Every Paceline collective reports
    missing ranks on timeout; the message from this function begins with the missing ranks.

    Args:
        group: the group; the default group if None.
        timeout: the time to wait, as a timedelta or in seconds; the group's timeout if None.
        wait_all_ranks: whether the message lists all missing ranks, rather than the first one and the number of other
            missing ranks.

    Raises:
        CollectiveTimeoutError: ranks are missing; the attribute `missing` lists all of them. The group can no longer be
            used.
        PeerLostError: a rank died or left. The group can no longer be used.
    """
    chosen = resolve(group, "monitored_barrier")
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
        tensor: a tensor with the same dtype and number of elements on every rank; it is read on the source and written
            on the other ranks.
        src, group_src: the source rank; pass either one.

    Raises:
        ValueError: the source is missing, given twice, or not in the group.
    """
    chosen = resolve(group, "broadcast")
    if chosen is None:
        return None
    return chosen.broadcast(tensor, chosen.rank_map.root_rank(src, group_src, "broadcast", "src"), async_op, timeout)


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
    """Reduces `tensor` over all ranks into the destination's `tensor`. The tensors on other ranks are not modified.

    Args:
        tensor: a tensor with the same dtype and number of elements on every rank.
        dst, group_dst: the destination rank; pass either one.
        op: the reduction. The default is SUM.

    Raises:
        ValueError: the destination is missing, given twice, or not in the group.
    """
    chosen = resolve(group, "reduce")
    if chosen is None:
        return None
    return chosen.reduce(tensor, chosen.rank_map.root_rank(dst, group_dst, "reduce", "dst"), op, async_op, timeout)


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
    """Gathers `tensor` from all ranks to the destination, where `gather_list[r]` receives rank r's tensor.

    Args:
        tensor: a tensor with the same dtype and number of elements on every rank.
        gather_list: on the destination, a list of one tensor like `tensor` for each rank; None or empty on other ranks.
        dst, group_dst: the destination rank. The default is the first rank of the group.

    Raises:
        ValueError: `gather_list` is missing or has the wrong length on the destination, or is passed on another rank.
    """
    chosen = resolve(group, "gather")
    if chosen is None:
        return None
    root = chosen.rank_map.root_rank(dst, group_dst, "gather", "dst", 0)
    return chosen.gather(gather_list, tensor, root, async_op, timeout)


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
        tensor: a tensor with the same dtype and number of elements on every rank.
        scatter_list: on the source, a list of one tensor like `tensor` for each rank; None or empty on other ranks.
        src, group_src: the source rank. The default is the first rank of the group.

    Raises:
        ValueError: `scatter_list` is missing or has the wrong length on the source, or is passed on another rank.
    """
    chosen = resolve(group, "scatter")
    if chosen is None:
        return None
    return chosen.scatter(
        tensor, scatter_list, chosen.rank_map.root_rank(src, group_src, "scatter", "src", 0), async_op, timeout
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

    With the engine "paceline" the result is bitwise equal on all ranks and in every run. The order of summation depends
    on the algorithm, the number of elements and the ranks, but not on the order in which ranks arrive. On one host,
    values are summed along a pairwise tree in rank order. With other engines, the library determines the order of
    summation. float16 and bfloat16 are accumulated in float32.

    Args:
        tensor: a tensor with the same dtype and number of elements on every rank, dense or sparse COO. A sparse tensor
            is coalesced afterward. For sparse tensors the call blocks until all ranks have made it, even with
            `async_op=True`, because the ranks must first exchange how many values they have.
        op: the reduction: a `ReduceOp`, a `PremulSum`, or one of torch's reductions. The default is SUM.
        group, async_op, timeout, wire: see the rules in the module's docstring.
    """
    chosen = resolve(group, "all_reduce")
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
    """Gathers every rank's `tensor` on all ranks; `tensor_list[r]` receives rank r's tensor.

    The ranks' tensors may differ in size. All ranks must then pass the same sizes in `tensor_list`. The call is
    performed as an `all_to_all` and appears as such in errors, recordings and profiles.

    Args:
        tensor_list: a list of one tensor for each rank, with the dtype and number of elements of that rank's `tensor`.
        tensor: a tensor with the same dtype on every rank.
        group, async_op, timeout, wire: see the rules in the module's docstring. `wire` requires tensors of one size.

    Raises:
        ValueError: `tensor_list` does not have one entry for each rank, or an entry has the wrong number of elements.
    """
    chosen = resolve(group, "all_gather")
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
    """Gathers every rank's `input_tensor` into `output_tensor` on all ranks, concatenated in rank order.

    Args:
        output_tensor: a contiguous tensor of any shape with `world_size` times as many elements as `input_tensor`.
        input_tensor: a tensor with the same dtype and number of elements on every rank.

    Raises:
        ValueError: `output_tensor` has the wrong number of elements, or is not contiguous.
    """
    chosen = resolve(group, "all_gather_into_tensor")
    if chosen is None:
        return None
    is_plain = async_op is False and timeout is None and isinstance(input_tensor, torch.Tensor)
    if is_plain and chosen.try_fast_all_gather(output_tensor, input_tensor):
        return None
    require_tensors("all_gather_into_tensor", output_tensor=output_tensor, input_tensor=input_tensor)
    count = input_tensor.numel()
    parts = parts_by_rank(output_tensor, count, chosen.rank_map, "all_gather_into_tensor", "output_tensor")
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
    """Alias of `all_gather_into_tensor`, under the name introduced in torch 2.13."""
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
    """Reduces `input_list[r]` over all ranks into the `output` of rank r.

    The parts may differ in size. All ranks must then pass the same sizes in `input_list`. The call is performed as one
    `reduce` to each rank in turn and appears as such in errors, recordings and profiles.

    Args:
        output: a tensor with the dtype and number of elements of this rank's entry in `input_list`.
        input_list: a list of one tensor for each rank, with the same dtypes and sizes on every rank.
        op: the reduction. The default is SUM.
        group, async_op, timeout, wire: see the rules in the module's docstring. `wire` requires parts of one size.

    Raises:
        ValueError: `input_list` does not have one entry for each rank, or an entry has the wrong number of elements.
    """
    chosen = resolve(group, "reduce_scatter")
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
    """Reduces `input` over all ranks and writes one part of the result to each rank's `output`.

    Args:
        output: a tensor with the same dtype and number of elements on every rank.
        input: a contiguous tensor of any shape with `world_size` times as many elements as `output`: the parts for all
            ranks, concatenated in rank order.
        op: the reduction. The default is SUM.

    Raises:
        ValueError: `input` has the wrong number of elements, or is not contiguous.
    """
    chosen = resolve(group, "reduce_scatter_tensor")
    if chosen is None:
        return None
    is_plain = async_op is False and timeout is None and isinstance(output, torch.Tensor)
    if is_plain and chosen.try_fast_reduce_scatter(output, input, op):
        return None
    require_tensors("reduce_scatter_tensor", output=output, input=input)
    parts = parts_by_rank(input, output.numel(), chosen.rank_map, "reduce_scatter_tensor", "input")
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
    """Alias of `reduce_scatter_tensor`, under the name introduced in torch 2.13."""
    return reduce_scatter_tensor(output, input, op, group, async_op, timeout, wire)


@eager
def all_to_all(
    output_tensor_list: Sequence[Tensors],
    input_tensor_list: Sequence[Tensors],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Sends `input_tensor_list[r]` to each rank r, and receives a tensor from each rank s into `output_tensor_list[s]`.

    Args:
        output_tensor_list, input_tensor_list: lists of one tensor for each rank, all of the same dtype. Sizes may
            differ between pairs of ranks; if a sender and a receiver disagree, every rank raises
            `CollectiveMismatchError`.

    Raises:
        ValueError: a list does not have one entry for each rank, or the two entries for this rank differ in size.
    """
    chosen = resolve(group, "all_to_all")
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
    """Sends rows of `input` to each rank, and receives rows from each rank into `output`, both in rank order.

    Args:
        output, input: tensors of the same dtype, which are divided among the ranks along the first dimension.
        output_split_sizes, input_split_sizes: the numbers of rows received from and sent to each rank. If None or
            empty, the rows are divided evenly.

    Raises:
        ValueError: the split sizes do not add up to the number of rows, or the rows cannot be divided evenly.
    """
    chosen = resolve(group, "all_to_all_single")
    if chosen is None:
        return None
    is_even = output_split_sizes is input_split_sizes is None
    are_tensors = isinstance(output, torch.Tensor) and isinstance(input, torch.Tensor)
    if is_even and are_tensors and async_op is False and timeout is None and chosen.try_fast_all_to_all(output, input):
        return None
    require_tensors("all_to_all_single", output=output, input=input)
    return chosen.all_to_all_rows(output, input, output_split_sizes, input_split_sizes, async_op, timeout)


def explain(operation: str, nbytes: int, group: Group = None) -> str:
    """Returns a printable table with the algorithm that `group` uses for a call and the times of all candidates.

    Args:
        operation: the name of a collective, such as "all_reduce".
        nbytes: the number of bytes in a rank's longest buffer: the tensor or, for a gather or scatter, all parts
            together.

    Raises:
        ValueError: there is no such operation, or this rank is not in the group.
    """
    chosen = resolve(group, "explain")
    if chosen is None:
        raise ValueError("explain: this rank is not in the group")
    return chosen.explain(operation, nbytes)
