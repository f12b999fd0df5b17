"""The collectives that have a root: one rank sends to all, or receives from all.

The rules at the head of `collectives.py` hold for them, and they raise the same errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.durations import Timeout
from paceline.group.arguments import root_rank
from paceline.group.buffers import Tensors
from paceline.group.default import Group, resolve
from paceline.group.eager import eager
from paceline.group.reduce_op import ReduceOp, Reduction
from paceline.group.work import Work


@eager
def broadcast(
    tensor: Tensors,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copies the source's `tensor` into that of every other rank.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank; read on the source, written elsewhere.
        src, group_src: the source.

    Raises:
        ValueError: there is no source, or it is given twice, or it is not in the group.
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
    """Reduces `tensor` over all ranks into that of the destination. Tensors of the other ranks are unchanged.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank.
        dst, group_dst: the destination.
        op: the reduction. The default is SUM.

    Raises:
        ValueError: there is no destination, or it is given twice, or it is not in the group.
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
    """Copies every rank's `tensor` to the destination: rank r's into `gather_list[r]` there.

    Args:
        tensor: a tensor of the same dtype and number of elements on every rank.
        gather_list: on the destination one tensor for each rank, like `tensor`; None or empty on other ranks.
        dst, group_dst: the destination. The default is the first rank of the group.

    Raises:
        ValueError: `gather_list` is missing on the destination, does not fit, or is given on another rank.
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
        scatter_list: on the source one tensor for each rank, like `tensor`; None or empty on other ranks.
        src, group_src: the source. The default is the first rank of the group.

    Raises:
        ValueError: `scatter_list` is missing on the source, does not fit, or is given on another rank.
    """
    chosen = resolve(group)
    if chosen is None:
        return None
    return chosen.scatter(
        tensor, scatter_list, root_rank(chosen, src, group_src, "scatter", "src", 0), async_op, timeout
    )
