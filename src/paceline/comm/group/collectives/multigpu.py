"""Collectives for processes that use several devices each, as in older releases of torch.distributed.

Each rank passes a list with one tensor for each of its devices, and each tensor is a member of the collective. For
example, `all_reduce_multigpu` reduces over all tensors on all ranks. A rank's tensors must have the same dtype and
number of elements. They can all be on the same device, such as the CPU.

A process reduces its own tensors along the same pairwise tree that the engine uses across ranks. If each process has
2^k tensors, the combined tree is therefore the same as if each tensor belonged to a rank of its own. The results are
bitwise equal on every device and in every run.

All raise the same errors as the functions in `collectives.py`, and:
    ValueError: a list is empty, its tensors differ in dtype or number of elements, or `src_tensor` or `dst_tensor` is
        out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES, PremulSum, ReduceOp, Reduction
from paceline.comm.group.default import Group, resolve
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work, join_works
from paceline.durations import Timeout

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_COMBINE: dict[ReduceOp, _Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

_OF_BOOLEANS: dict[ReduceOp, _Combine] = dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), torch.logical_or)
_OF_BOOLEANS |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), torch.logical_and)
_OF_BOOLEANS[ReduceOp.BXOR] = torch.logical_xor

# PyTorch cannot add, multiply or compare unsigned integers wider than a byte, so these are viewed as signed integers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@eager
def broadcast_multigpu(
    tensor_list: Sequence[torch.Tensor],
    src: int,
    group: Group = None,
    async_op: bool = False,
    src_tensor: int = 0,
    timeout: Timeout | None = None,
) -> Work | None:
    """Broadcasts the source's `tensor_list[src_tensor]` to all tensors on all ranks."""
    call = "broadcast_multigpu"
    chosen = resolve(group, "broadcast_multigpu")
    if chosen is None:
        return None
    _require_alike(tensor_list, call, "tensor_list")
    root = chosen.rank_map.root_rank(src, None, call, "src")
    through = _pick(tensor_list, src_tensor, call, "src_tensor") if chosen.rank() == root else tensor_list[0]
    work = chosen.broadcast(through, root, async_op, timeout)
    return join_works([work], call, tensor_list, lambda: _spread(through, tensor_list))


@eager
def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces all tensors on all ranks, and writes the result to each of them."""
    call = "all_reduce_multigpu"
    chosen = resolve(group, "all_reduce_multigpu")
    if chosen is None:
        return None
    _require_alike(tensor_list, call, "tensor_list")
    total = reduce_locally(tensor_list, op, call)
    reduced, works, divide = _with_members(chosen, total, len(tensor_list), op, async_op, timeout)
    works.append(chosen.all_reduce(reduced, _between_ranks(op), async_op, timeout))
    return join_works(works, call, tensor_list, lambda: _spread(divide(total), tensor_list))


@eager
def reduce_multigpu(
    tensor_list: Sequence[torch.Tensor],
    dst: int,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    dst_tensor: int = 0,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces all tensors on all ranks into the destination's `tensor_list[dst_tensor]`, the only tensor modified."""
    call = "reduce_multigpu"
    chosen = resolve(group, "reduce_multigpu")
    if chosen is None:
        return None
    _require_alike(tensor_list, call, "tensor_list")
    root = chosen.rank_map.root_rank(dst, None, call, "dst")
    total = reduce_locally(tensor_list, op, call)
    reduced, works, divide = _with_members(chosen, total, len(tensor_list), op, async_op, timeout)
    into = [_pick(tensor_list, dst_tensor, call, "dst_tensor")] if chosen.rank() == root else []
    works.append(chosen.reduce(reduced, root, _between_ranks(op), async_op, timeout))
    return join_works(works, call, tensor_list, lambda: _spread(divide(total), into))


@eager
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Gathers all ranks' tensors on each device: `output_tensor_lists[i][r * n + j]` receives rank r's tensor j.

    `i` is the index of one of this rank's devices, and `n` is the number of devices, which is the same on every rank.
    """
    call = "all_gather_multigpu"
    chosen = resolve(group, "all_gather_multigpu")
    if chosen is None:
        return None
    _require_alike(input_tensor_list, call, "input_tensor_list")
    n = len(input_tensor_list)
    _require_lists(output_tensor_lists, n, n * chosen.size(), call, "output_tensor_lists")
    device = input_tensor_list[0].device  # a call's tensors must be on one device
    first = _on(device, output_tensor_lists[0])
    by_rank = [first[r * n : (r + 1) * n] for r in range(chosen.size())]
    inputs = [tensor.detach().to(device) for tensor in input_tensor_list]
    work = chosen.all_gather(by_rank, inputs, async_op, timeout)

    def spread() -> None:
        for outputs in output_tensor_lists:
            for tensor, gathered in zip(outputs, first, strict=True):
                _spread(gathered, [tensor])

    return join_works([work], call, [tensor for outputs in output_tensor_lists for tensor in outputs], spread)


@eager
def reduce_scatter_multigpu(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_lists: Sequence[Sequence[torch.Tensor]],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces `input_tensor_lists[i][r * n + j]` over all i and all ranks into rank r's `output_tensor_list[j]`.

    `i` is the index of a device, and `n` is the number of devices, which is the same on every rank.
    """
    call = "reduce_scatter_multigpu"
    chosen = resolve(group, "reduce_scatter_multigpu")
    if chosen is None:
        return None
    _require_alike(output_tensor_list, call, "output_tensor_list")
    n = len(output_tensor_list)
    members = n * chosen.size()
    _require_lists(input_tensor_lists, n, members, call, "input_tensor_lists")
    totals = [reduce_locally(list(tensors), op, call) for tensors in zip(*input_tensor_lists, strict=True)]
    outputs = [torch.empty_like(total) for total in totals[:n]]
    inputs = [totals[r * n : (r + 1) * n] for r in range(chosen.size())]
    work = chosen.reduce_scatter(outputs, inputs, _between_ranks(op), async_op, timeout)

    def finish() -> None:
        for output, total in zip(output_tensor_list, outputs, strict=True):
            _spread(divided(total, members) if op is ReduceOp.AVG else total, [output])

    return join_works([work], call, output_tensor_list, finish)


def _between_ranks(op: Reduction) -> ReduceOp:
    """Returns the reduction between ranks, after each rank has reduced its own tensors with `op`.

    For AVG and PREMUL_SUM the result is SUM: an average is divided at the end, and the factor of PREMUL_SUM has already
    been applied.
    """
    return ReduceOp.SUM if isinstance(op, PremulSum) or op is ReduceOp.AVG else op


def _with_members(
    group: ProcessGroup, total: torch.Tensor, count: int, op: Reduction, async_op: bool, timeout: Timeout | None
) -> tuple[list[torch.Tensor], list[Work | None], Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the tensors to reduce, the `Work` in progress, and a function that computes the result from the total.

    An average requires the total number of members, because each rank can have a different number of them. The number
    of members is reduced together with the total if the dtype can represent it, and in a separate call otherwise.
    """
    if op is not ReduceOp.AVG:
        return [total], [], lambda reduced: reduced
    if total.is_floating_point() or total.is_complex():
        members = torch.full((1,), count, dtype=total.dtype, device=total.device)
        return [total, members], [], lambda reduced: reduced / members
    counted = torch.full((1,), count, dtype=torch.int64, device="cpu")
    work = group.all_reduce(counted, ReduceOp.SUM, async_op, timeout)
    return [total], [work], lambda reduced: divided(reduced, int(counted))


def _on(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors, but replaces those on other devices with uninitialized tensors on this device."""
    return [t if t.device == device else torch.empty_like(t, device=device) for t in tensors]


def _spread(tensor: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    for target in into:
        if target is not tensor:
            target.detach().copy_(tensor.detach().reshape(target.shape))


def _pick(tensors: Sequence[torch.Tensor], index: int, call: str, name: str) -> torch.Tensor:
    if not 0 <= index < len(tensors):
        raise ValueError(f"{call}: {name} is {index}; tensor_list has tensors 0 to {len(tensors) - 1}")
    return tensors[index]


def _require_alike(tensors: Sequence[torch.Tensor], call: str, name: str) -> None:
    if isinstance(tensors, torch.Tensor) or not tensors:
        seen = "a tensor" if isinstance(tensors, torch.Tensor) else "empty"
        raise ValueError(f"{call}: {name} is {seen}; it must be a list of tensors, one for each device")
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype or tensor.numel() != first.numel():
            raise ValueError(
                f"{call}: {name}[{index}] has {tensor.numel()} elements of {tensor.dtype}, {name}[0] has "
                f"{first.numel()} of {first.dtype}; they must have the same size and type"
            )


def _require_lists(lists: Sequence[Sequence[torch.Tensor]], devices: int, members: int, call: str, name: str) -> None:
    lengths = [len(tensors) for tensors in lists]
    if lengths != [members] * devices:
        raise ValueError(
            f"{call}: {name} has lists of the lengths {lengths}; with {devices} devices per rank and {members} in "
            f"total it must have {devices} lists of {members} tensors"
        )


def reduce_locally(tensors: Sequence[torch.Tensor], op: Reduction, call: str) -> torch.Tensor:
    """Reduces `tensors` to a new tensor with the shape and device of the first one.

    For float16 and bfloat16 tensors the result is in float32, so that the caller rounds only once, at the end. For AVG
    the result is the sum, and for PREMUL_SUM the sum of the multiplied tensors.
    """
    first = tensors[0]
    code = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    _require_alike(tensors, call, "tensors")
    if not isinstance(code, ReduceOp):
        raise TypeError(f"{call}: op must be a paceline.ReduceOp or a paceline.PremulSum, not {type(op).__name__}")
    if first.dtype not in DTYPE_CODES or not _core.reduces(DTYPE_CODES[first.dtype], code):
        raise TypeError(f"{call}: {code.name} is not defined for {first.dtype}; convert the tensors first")
    wide = [
        _scaled(tensor.detach(), op).to(first.device, _WIDE.get(first.dtype, first.dtype)).reshape(first.shape)
        for tensor in tensors
    ]
    if first.dtype in _SIGNED:
        return _reduce_unsigned(wide, code)
    combine = (_OF_BOOLEANS if first.dtype is torch.bool else _COMBINE)[code]
    return _tree(wide, combine) if len(wide) > 1 else wide[0].clone()


def divided(total: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the average of `count` tensors whose sum is `total`; the average of integers is truncated."""
    if total.is_floating_point() or total.is_complex():
        return total / count
    average = total.to("cpu", memory_format=torch.contiguous_format, copy=True)
    if average.numel():
        address = average.data_ptr()
        _core.reduce(address, [address], average.numel(), DTYPE_CODES[average.dtype], ReduceOp.AVG, count)
    return average.to(total.device)


def _scaled(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    return tensor.clone().mul_(op.factor) if isinstance(op, PremulSum) else tensor


def _reduce_unsigned(tensors: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    dtype = tensors[0].dtype
    signed = [tensor.contiguous().view(_SIGNED[dtype]) for tensor in tensors]
    # With the highest bit flipped, comparing the signed numbers yields the unsigned order.
    flipped = torch.iinfo(_SIGNED[dtype]).min if op in (ReduceOp.MIN, ReduceOp.MAX) else 0
    return _tree([tensor ^ flipped for tensor in signed], _COMBINE[op]).bitwise_xor_(flipped).view(dtype)


def _tree(tensors: Sequence[torch.Tensor], combine: _Combine) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    half = 1 << (len(tensors) - 1).bit_length() - 1
    return combine(_tree(tensors[:half], combine), _tree(tensors[half:], combine))
