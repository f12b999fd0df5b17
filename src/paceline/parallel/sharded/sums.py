"""Adds the ranks' sums over their shards, in the order of the tree over all shards.

Each rank adds one slice of the values, and all ranks gather the slices. That moves as many bytes as an all-reduce, but
in an order that this module controls: engines add over ranks, some of them in another order than a tree, and some round
half-precision sums once for all ranks, which a tree over shards could not continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.sharded.tree import Node, add_up, nodes_within

Values = dict[torch.dtype, torch.Tensor]


def pack(tensors: Sequence[torch.Tensor], multiple: int) -> Values:
    """Returns the tensors of each dtype concatenated, with zeros up to a length that `multiple` divides."""
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        flat.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    for dtype, parts in flat.items():
        parts.append(torch.zeros(-sum(part.numel() for part in parts) % multiple, dtype=dtype))
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


def add_over_ranks(
    mine: Mapping[Node, torch.Tensor], shards: int, group: ProcessGroup, runs: Sequence[range]
) -> torch.Tensor:
    """Returns the sum over all shards, which has the same bits on every rank of any group.

    Args:
        mine: the sums of `nodes_within` this rank's run, in that order; one-dimensional, of one dtype and of one
            length, which the number of ranks divides.
        shards: the number of shards.
        group: the ranks.
        runs: each rank's shards.
    """
    root, size = Node(0, shards), group.size()
    if size == 1:
        return mine[root]
    nodes = [nodes_within(run, root) for run in runs]
    some = next(iter(mine.values()))
    count = some.numel() // size
    inputs = [[value[rank * count : (rank + 1) * count] for value in mine.values()] for rank in range(size)]
    outputs = [[some.new_empty(count) for _ in theirs] for theirs in nodes]
    group.all_to_all(outputs, inputs)
    known = {
        node: value
        for theirs, values in zip(nodes, outputs, strict=True)
        for node, value in zip(theirs, values, strict=True)
    }
    total = add_up(root, torch.Tensor.add_, _no_leaf, known)
    whole = torch.empty_like(some)
    group.all_gather([whole[rank * count : (rank + 1) * count] for rank in range(size)], total)
    return whole


def _no_leaf(shard: int) -> torch.Tensor:
    raise AssertionError(f"no rank has shard {shard}")
