"""Adds the ranks' sums over their shards, in the order of the tree over all shards.

Each rank adds one slice of the values, and all ranks gather the slices. That moves as many bytes as an all-reduce, but
in an order that this module controls: engines add over ranks, some of them in another order than a tree, and some round
half-precision sums once for all ranks, which a tree over shards could not continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.group.objects.collectives import broadcast_object_list
from paceline.group.process_group import ProcessGroup
from paceline.parallel.sharded.tree import Node, add_up

Values = dict[torch.dtype, torch.Tensor]


def pack(tensors: Sequence[torch.Tensor]) -> Values:
    """Returns the tensors of each dtype concatenated."""
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    return {dtype: torch.cat(parts) for dtype, parts in flat.items()}


def unpack(values: Values, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of `values` with the shapes and dtypes of the tensors that were packed."""
    taken = dict.fromkeys(values, 0)
    views = []
    for tensor in like:
        first = taken[tensor.dtype]
        taken[tensor.dtype] += tensor.numel()
        views.append(values[tensor.dtype][first : first + tensor.numel()].view(tensor.shape))
    return views


def add(left: Values, right: Values) -> Values:
    """Adds `right` to `left` in place, and returns it."""
    for dtype, flat in left.items():
        flat.add_(right[dtype])
    return left


def sum_over_ranks(
    mine: Mapping[Node, Values], nodes: Sequence[Sequence[Node]], shards: int, group: ProcessGroup
) -> Values:
    """Returns the sum over all shards, which has the same bits on every rank of any group.

    Args:
        mine: the sums of this rank's nodes, which are not changed; with the same dtypes and lengths on all
            ranks. The result of a group of one rank may be one of them.
        nodes: each rank's nodes of the tree, which together hold every shard once.
        shards: the number of shards.
        group: the ranks.
    """
    own = [mine[node] for node in nodes[group.rank()]]
    if all(nodes):
        lengths = {dtype: flat.numel() for dtype, flat in own[0].items()}
    else:  # a rank without shards does not know what is added
        lengths = _announced_lengths(own, nodes, group)
    return {
        dtype: _sum_of_dtype([values[dtype] for values in own], nodes, shards, group, torch.empty(0, dtype=dtype), n)
        for dtype, n in lengths.items()
    }


def _announced_lengths(
    own: Sequence[Values], nodes: Sequence[Sequence[Node]], group: ProcessGroup
) -> dict[torch.dtype, int]:
    """Returns the number of elements of each dtype, on ranks without a value too."""
    first = next(rank for rank, theirs in enumerate(nodes) if theirs)
    said = [{str(dtype).removeprefix("torch."): flat.numel() for dtype, flat in own[0].items()} if own else {}]
    broadcast_object_list(said, group_src=first, group=group)
    return {getattr(torch, name): length for name, length in said[0].items()}


def _sum_of_dtype(
    own: Sequence[torch.Tensor],
    nodes: Sequence[Sequence[Node]],
    shards: int,
    group: ProcessGroup,
    like: torch.Tensor,
    length: int,
) -> torch.Tensor:
    root, size, rank = Node(0, shards), group.size(), group.rank()
    if size == 1:
        # Out of place, since the values that were given may be needed again.
        return add_up(root, torch.Tensor.add, _no_leaf, dict(zip(nodes[0], own, strict=True)))
    each = -(-length // size)
    bounds = [(min(length, r * each), min(length, (r + 1) * each)) for r in range(size)]
    inputs = [[value[start:stop] for value in own] for start, stop in bounds]
    width = bounds[rank][1] - bounds[rank][0]
    outputs = [[like.new_empty(width) for _ in theirs] for theirs in nodes]
    group.all_to_all(outputs, inputs)
    known = {
        node: value
        for theirs, values in zip(nodes, outputs, strict=True)
        for node, value in zip(theirs, values, strict=True)
    }
    total = add_up(root, torch.Tensor.add_, _no_leaf, known)
    if width < each:
        total = torch.cat([total, like.new_zeros(each - width)])
    whole = like.new_empty(each * size)
    group.all_gather(list(whole.split(each)), total)
    return whole[:length]


def _no_leaf(shard: int) -> torch.Tensor:
    raise AssertionError(f"no rank has shard {shard}")
