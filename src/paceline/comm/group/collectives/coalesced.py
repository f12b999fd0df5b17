"""Collectives on lists of tensors with different dtypes.

The plain collectives take lists of tensors of one dtype; these functions call a plain collective for each dtype. All
ranks must pass tensors with the same dtypes and sizes in the same order. With `async_op=True` a function returns a
single `Work` for all of its calls (torch.distributed returns the result of `get_future()` instead).

All raise:
    ValueError: corresponding lists differ in length. All other errors are those of the functions in `collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

import torch

from paceline.comm.engine.channel import ReduceOp, Reduction
from paceline.comm.group.buffers import Tensors, as_list
from paceline.comm.group.call_plan import parts_by_rank
from paceline.comm.group.default import Group, resolve
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work, join_works
from paceline.durations import Timeout

BUFFER_SIZE = 250 << 20  # bytes; the same as in torch's DistributedDataParallel


@eager
def all_reduce_coalesced(
    tensors: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces each of `tensors` over all ranks, in place."""
    call = "all_reduce_coalesced"
    chosen = resolve(group, "all_reduce_coalesced")
    if chosen is None:
        return None
    listed = as_list(tensors, call)
    return _start_by_type(
        call, listed, listed, lambda indices: chosen.all_reduce([listed[i] for i in indices], op, async_op, timeout)
    )


@eager
def broadcast_coalesced(
    tensors: Tensors,
    src: int | None = None,
    group: Group = None,
    buffer_size: int = BUFFER_SIZE,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Broadcasts the source's `tensors` to all ranks. The default source is the first rank of the group.

    Each underlying broadcast contains tensors of up to `buffer_size` bytes in total, or a single larger tensor.
    """
    call = "broadcast_coalesced"
    chosen = resolve(group, "broadcast_coalesced")
    if chosen is None:
        return None
    if buffer_size <= 0:
        raise ValueError(f"{call}: buffer_size is {buffer_size}; it is a positive number of bytes")
    listed = as_list(tensors, call)
    root = chosen.rank_map.root_rank(src, group_src, call, "src", 0)
    buckets = [bucket for indices in _by_type(listed) for bucket in _buckets(listed, indices, buffer_size)]
    works = [chosen.broadcast([listed[i] for i in bucket], root, async_op, timeout) for bucket in buckets]
    return join_works(works, call, listed)


@eager
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies rank r's `input_tensor_list[i]` to `output_tensor_lists[r][i]` on all ranks, for every rank r."""
    call = "all_gather_coalesced"
    chosen = resolve(group, "all_gather_coalesced")
    if chosen is None:
        return None
    inputs = as_list(input_tensor_list, call)
    _require_length(output_tensor_lists, chosen.size(), call, "output_tensor_lists", "one list for each rank")
    for rank, outputs in enumerate(output_tensor_lists):
        _require_length(outputs, len(inputs), call, f"output_tensor_lists[{rank}]", "as many as input_tensor_list")

    def gather(indices: list[int]) -> Work | None:
        theirs = [[outputs[i] for i in indices] for outputs in output_tensor_lists]
        return chosen.all_gather(theirs, [inputs[i] for i in indices], async_op, timeout)

    return _start_by_type(call, inputs, [tensor for outputs in output_tensor_lists for tensor in outputs], gather)


@eager
def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Calls `all_gather_into_tensor` for each pair of `output_tensors` and `input_tensors`.

    Raises:
        ValueError: an output is not contiguous or does not have `world_size` times as many elements as its input.
    """
    call = "all_gather_into_tensor_coalesced"
    chosen = resolve(group, "all_gather_into_tensor_coalesced")
    if chosen is None:
        return None
    inputs = as_list(input_tensors, call)
    outputs = as_list(output_tensors, call)
    _require_length(outputs, len(inputs), call, "output_tensors", "as many as input_tensors")
    parts = _all_parts(outputs, inputs, chosen, call, "output_tensors")
    return _start_by_type(
        call,
        inputs,
        outputs,
        lambda indices: chosen.all_gather(
            _of_ranks(parts, indices, chosen), [inputs[i] for i in indices], async_op, timeout
        ),
    )


@eager
def reduce_scatter_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensor_lists: Sequence[Sequence[torch.Tensor]],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces the ranks' `input_tensor_lists[i][r]` into rank r's `output_tensors[i]`."""
    call = "reduce_scatter_coalesced"
    chosen = resolve(group, "reduce_scatter_coalesced")
    if chosen is None:
        return None
    outputs = as_list(output_tensors, call)
    _require_length(input_tensor_lists, len(outputs), call, "input_tensor_lists", "as many as output_tensors")
    for i, inputs in enumerate(input_tensor_lists):
        _require_length(inputs, chosen.size(), call, f"input_tensor_lists[{i}]", "one tensor for each rank")
    return _reduce_scatter(call, chosen, outputs, input_tensor_lists, op, async_op, timeout)


@eager
def reduce_scatter_tensor_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Calls `reduce_scatter_tensor` for each pair of `output_tensors` and `input_tensors`.

    Raises:
        ValueError: an input is not contiguous or does not have `world_size` times as many elements as its output.
    """
    call = "reduce_scatter_tensor_coalesced"
    chosen = resolve(group, "reduce_scatter_tensor_coalesced")
    if chosen is None:
        return None
    inputs = as_list(input_tensors, call)
    outputs = as_list(output_tensors, call)
    _require_length(inputs, len(outputs), call, "input_tensors", "as many as output_tensors")
    parts = _all_parts(inputs, outputs, chosen, call, "input_tensors")
    return _reduce_scatter(call, chosen, outputs, parts, op, async_op, timeout)


def _reduce_scatter(
    call: str,
    group: ProcessGroup,
    outputs: list[torch.Tensor],
    parts: Sequence[Sequence[torch.Tensor]],
    op: Reduction,
    async_op: bool,
    timeout: Timeout | None,
) -> Work | None:
    return _start_by_type(
        call,
        outputs,
        outputs,
        lambda indices: group.reduce_scatter(
            [outputs[i] for i in indices], _of_ranks(parts, indices, group), op, async_op, timeout
        ),
    )


def _start_by_type(
    call: str,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    start: Callable[[list[int]], Work | None],
) -> Work | None:
    """Calls `start` for each dtype with the indices of the tensors of that dtype, or once if there are no tensors."""
    return join_works([start(indices) for indices in _by_type(tensors)], call, results)


def _by_type(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    indices: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(i)
    return list(indices.values()) or [[]]


def _buckets(tensors: Sequence[torch.Tensor], indices: list[int], nbytes: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    filled = 0
    for i in indices:
        if buckets[-1] and filled + tensors[i].nbytes > nbytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += tensors[i].nbytes
    return buckets


def _all_parts(
    wholes: list[torch.Tensor], parts: list[torch.Tensor], group: ProcessGroup, call: str, name: str
) -> list[list[torch.Tensor]]:
    return [
        parts_by_rank(whole, part.numel(), group.rank_map, call, f"{name}[{i}]")
        for i, (whole, part) in enumerate(zip(wholes, parts, strict=True))
    ]


def _of_ranks(
    parts: Sequence[Sequence[torch.Tensor]], indices: list[int], group: ProcessGroup
) -> list[list[torch.Tensor]]:
    return [[parts[i][rank] for i in indices] for rank in range(group.size())]


def _require_length(entries: Sequence[object], count: int, call: str, name: str, what: str) -> None:
    is_list = isinstance(entries, Sized) and not isinstance(entries, torch.Tensor)
    if not is_list or len(entries) != count:
        seen = f"{len(entries)} entries" if is_list else type(entries).__name__
        raise ValueError(f"{call}: {name} is {seen}; it must be a list of {count}, {what}")
