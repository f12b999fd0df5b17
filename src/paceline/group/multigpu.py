"""Collectives for processes that have several devices each, as torch.distributed had them.

Each rank passes a list with one tensor for each of its devices, and each tensor is a member of the collective:
`all_reduce_multigpu` sums over all tensors of all ranks. A rank's tensors have one type and one number of elements, and
may also be on a single device, such as the CPU. Reductions have a fixed order (`local_reduction.py`), so their results
are bitwise the same on every device and from run to run.

All of them raise what other collectives raise, and:
    ValueError: a list is empty, its tensors differ, or `src_tensor` or `dst_tensor` is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.durations import Timeout
from paceline.group.arguments import root_rank
from paceline.group.default import Group, resolve
from paceline.group.eager import eager
from paceline.group.local_reduction import divided, reduce_locally
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction
from paceline.group.work import Work, ended


@eager
def broadcast_multigpu(
    tensor_list: Sequence[torch.Tensor],
    src: int,
    group: Group = None,
    async_op: bool = False,
    src_tensor: int = 0,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies the source's `tensor_list[src_tensor]` to all tensors of all ranks."""
    call = "broadcast_multigpu"
    chosen = resolve(group)
    if chosen is None:
        return None
    _require_alike(tensor_list, call, "tensor_list")
    root = root_rank(chosen, src, None, call, "src")
    through = _pick(tensor_list, src_tensor, call, "src_tensor") if chosen.rank() == root else tensor_list[0]
    work = chosen.broadcast(through, root, async_op, timeout)
    return ended([work], call, tensor_list, lambda: _spread(through, tensor_list))


@eager
def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces all tensors of all ranks; each of them receives the result."""
    call = "all_reduce_multigpu"
    chosen = resolve(group)
    if chosen is None:
        return None
    _require_alike(tensor_list, call, "tensor_list")
    total = reduce_locally(tensor_list, op, call)
    reduced, works, divide = _with_members(chosen, total, len(tensor_list), op, async_op, timeout)
    works.append(chosen.all_reduce(reduced, _between_ranks(op), async_op, timeout))
    return ended(works, call, tensor_list, lambda: _spread(divide(total), tensor_list))


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
    """Reduces all tensors of all ranks into the destination's `tensor_list[dst_tensor]`; the others do not change."""
    call = "reduce_multigpu"
    chosen = resolve(group)
    if chosen is None:
        return None
    _require_alike(tensor_list, call, "tensor_list")
    root = root_rank(chosen, dst, None, call, "dst")
    total = reduce_locally(tensor_list, op, call)
    reduced, works, divide = _with_members(chosen, total, len(tensor_list), op, async_op, timeout)
    into = [_pick(tensor_list, dst_tensor, call, "dst_tensor")] if chosen.rank() == root else []
    works.append(chosen.reduce(reduced, root, _between_ranks(op), async_op, timeout))
    return ended(works, call, tensor_list, lambda: _spread(divide(total), into))


@eager
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies all tensors of all ranks to each device: rank r's tensor j is `output_tensor_lists[i][r * n + j]`.

    `i` counts this rank's devices and `n` is their number, the same on every rank.
    """
    call = "all_gather_multigpu"
    chosen = resolve(group)
    if chosen is None:
        return None
    _require_alike(input_tensor_list, call, "input_tensor_list")
    n = len(input_tensor_list)
    _require_lists(output_tensor_lists, n, n * chosen.size(), call, "output_tensor_lists")
    first, *others = output_tensor_lists
    by_rank = [list(first[r * n : (r + 1) * n]) for r in range(chosen.size())]
    work = chosen.all_gather(by_rank, list(input_tensor_list), async_op, timeout)

    def spread() -> None:
        for each in others:
            for tensor, arrived in zip(each, first, strict=True):
                tensor.detach().copy_(arrived)

    return ended([work], call, [tensor for each in output_tensor_lists for tensor in each], spread)


@eager
def reduce_scatter_multigpu(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_lists: Sequence[Sequence[torch.Tensor]],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Reduces `input_tensor_lists[i][r * n + j]` over all devices i of all ranks into rank r's `output_tensor_list[j]`.

    `n` is the number of devices of each rank, the same on every rank.
    """
    call = "reduce_scatter_multigpu"
    chosen = resolve(group)
    if chosen is None:
        return None
    _require_alike(output_tensor_list, call, "output_tensor_list")
    n = len(output_tensor_list)
    members = n * chosen.size()
    _require_lists(input_tensor_lists, n, members, call, "input_tensor_lists")
    totals = [reduce_locally([each[at] for each in input_tensor_lists], op, call) for at in range(members)]
    outputs = [torch.empty_like(total) for total in totals[:n]]
    inputs = [totals[r * n : (r + 1) * n] for r in range(chosen.size())]
    work = chosen.reduce_scatter(outputs, inputs, _between_ranks(op), async_op, timeout)

    def finish() -> None:
        for output, total in zip(output_tensor_list, outputs, strict=True):
            _spread(divided(total, members) if op is ReduceOp.AVG else total, [output])

    return ended([work], call, output_tensor_list, finish)


def _between_ranks(op: Reduction) -> ReduceOp:
    """Returns the reduction between ranks, after each rank has reduced its own tensors with `op`.

    It is SUM for AVG, which divides in the end, and for PREMUL_SUM, whose factor has been applied.
    """
    return ReduceOp.SUM if isinstance(op, PremulSum) or op is ReduceOp.AVG else op


def _with_members(
    group: ProcessGroup, total: torch.Tensor, count: int, op: Reduction, async_op: bool, timeout: Timeout | None
) -> tuple[list[torch.Tensor], list[Work | None], Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the tensors to reduce, calls that have started already, and what turns the reduced total into the result.

    An average needs the number of members, which may differ by rank; it travels with the total if the type can hold it.
    """
    if op is not ReduceOp.AVG:
        return [total], [], lambda reduced: reduced
    if total.is_floating_point() or total.is_complex():
        members = torch.full((1,), count, dtype=total.dtype, device=total.device)
        return [total, members], [], lambda reduced: reduced / members
    counted = torch.full((1,), count, dtype=torch.int64, device="cpu")
    work = group.all_reduce(counted, ReduceOp.SUM, async_op, timeout)
    return [total], [work], lambda reduced: divided(reduced, int(counted))


def _spread(tensor: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    for each in into:
        if each is not tensor:
            each.detach().copy_(tensor.detach().reshape(each.shape))


def _pick(tensors: Sequence[torch.Tensor], at: int, call: str, name: str) -> torch.Tensor:
    if not 0 <= at < len(tensors):
        raise ValueError(f"{call}: {name} is {at}; tensor_list has tensors 0 to {len(tensors) - 1}")
    return tensors[at]


def _require_alike(tensors: Sequence[torch.Tensor], call: str, name: str) -> None:
    if isinstance(tensors, torch.Tensor) or not tensors:
        seen = "a tensor" if isinstance(tensors, torch.Tensor) else "empty"
        raise ValueError(f"{call}: {name} is {seen}; it must be a list of tensors, one for each device")
    first = tensors[0]
    for at, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype or tensor.numel() != first.numel():
            raise ValueError(
                f"{call}: {name}[{at}] has {tensor.numel()} elements of {tensor.dtype}, {name}[0] has {first.numel()} "
                f"of {first.dtype}; they must be alike"
            )


def _require_lists(lists: Sequence[Sequence[torch.Tensor]], devices: int, members: int, call: str, name: str) -> None:
    lengths = [len(each) for each in lists]
    if lengths != [members] * devices:
        raise ValueError(
            f"{call}: {name} has lists of the lengths {lengths}; with {devices} devices a rank and {members} in all it "
            f"must have {devices} lists of {members} tensors"
        )
