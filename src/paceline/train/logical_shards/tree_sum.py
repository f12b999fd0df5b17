"""Distributed sum over shards, in the order of a fixed binary tree.

The tree combines neighboring shards pairwise, like the core's tree over ranks: ((0 + 1) + (2 + 3)) + ((4 + 5) + ...). A
node covers a run of consecutive shards, and its value does not depend on the rank that computes it. The core adds the
values in place if each rank has exactly one node, if the tree over these nodes is the pairwise tree over ranks, and if
the engine supports that order (see `ProcessGroup.sums_as_tree`). Otherwise, each rank adds one slice of the values, and
all ranks gather the slices. This sends as many bytes as an all-reduce. A plain all-reduce would not suffice, because
most engines do not add in tree order, and some round half-precision sums only once at the end, which differs from
rounding at each node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, NoReturn, TypeVar

import torch

from paceline.comm.group.collectives.object_collectives import broadcast_object_list
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.module_tensors import shares_memory

Value = TypeVar("Value")


class Node(NamedTuple):
    """A node of the tree, which covers the shards `range(first, stop)`."""

    first: int
    stop: int

    @property
    def halves(self) -> tuple[Node, Node]:
        """The two children of a node that covers more than one shard."""
        half = 1 << ((self.stop - self.first - 1).bit_length() - 1)
        return Node(self.first, self.first + half), Node(self.first + half, self.stop)


def run_of_rank(shards: int, num_ranks: int, rank: int) -> range:
    """Returns the range of shards that a rank computes.

    >>> [list(run_of_rank(8, 3, rank)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    length, longer = divmod(shards, num_ranks)
    first = rank * length + min(rank, longer)
    return range(first, first + length + (rank < longer))


def nodes_within(run: range, node: Node) -> list[Node]:
    """Returns the largest nodes that are in the subtree of `node` and cover only shards in `run`.

    A rank can add up these nodes on its own. If the number of ranks is a power of two that divides the number of
    shards, each rank has exactly one.

    >>> nodes_within(range(3, 6), Node(0, 8))
    [Node(first=3, stop=4), Node(first=4, stop=6)]
    """
    if run.start <= node.first and node.stop <= run.stop:
        return [node]
    if node.stop <= run.start or run.stop <= node.first:
        return []
    left, right = node.halves
    return nodes_within(run, left) + nodes_within(run, right)


def is_tree_over_ranks(root: Node, nodes: Sequence[Sequence[Node]]) -> bool:
    """Returns True if each rank has one node and these nodes form the pairwise tree over ranks.

    >>> is_tree_over_ranks(Node(0, 8), [[Node(0, 4)], [Node(4, 8)]])
    True
    >>> is_tree_over_ranks(Node(0, 8), [[Node(4, 8)], [Node(0, 4)]])
    False
    """

    def is_below(node: Node, ranks: Node) -> bool:
        if ranks.stop - ranks.first == 1:
            return list(nodes[ranks.first]) == [node]
        return node.stop - node.first > 1 and all(map(is_below, node.halves, ranks.halves))

    return is_below(root, Node(0, len(nodes)))


def add_up(
    node: Node, add: Callable[[Value, Value], Value], leaf: Callable[[int], Value], known: Mapping[Node, Value]
) -> Value:
    """Returns the value of `node`: a known value, the value of a single shard, or the sum of its two halves.

    The sum is computed depth first, so that at most one value per tree level is in memory.
    """
    if node in known:
        return known[node]
    if node.stop - node.first == 1:
        return leaf(node.first)
    left, right = node.halves
    return add(add_up(left, add, leaf, known), add_up(right, add, leaf, known))


Values = list[torch.Tensor]  # a shard's tensors; dtypes, shapes and devices are the same for all shards
Flat = dict[tuple[torch.dtype, torch.device], torch.Tensor]


def pack(tensors: Sequence[torch.Tensor]) -> Flat:
    """Concatenates the tensors of each dtype and device."""
    flat: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        flat.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().reshape(-1))
    return {key: torch.cat(parts) for key, parts in flat.items()}


def lengths_of(tensors: Sequence[torch.Tensor]) -> dict[tuple[torch.dtype, torch.device], int]:
    """Returns the lengths of the flat tensors that `pack` would return."""
    lengths: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = tensor.dtype, home_of(tensor)
        lengths[key] = lengths.get(key, 0) + tensor.numel()
    return lengths


def home_of(tensor: torch.Tensor) -> torch.device:
    """Returns a tensor's device, or the CPU for a meta tensor, which is a placeholder for a CPU tensor."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def unpack(flat: Flat, like: Sequence[torch.Tensor]) -> Values:
    """Splits packed tensors into views with the shapes, dtypes and devices of the tensors in `like`."""
    taken = dict.fromkeys(flat, 0)
    views = []
    for tensor in like:
        key = tensor.dtype, home_of(tensor)
        first = taken[key]
        taken[key] += tensor.numel()
        views.append(flat[key][first : first + tensor.numel()].view(tensor.shape))
    return views


def gradient_or_zeros(param: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Returns the detached gradient (a copy if other tensors share its memory), or zeros if the gradient is None."""
    if gradient is None:
        return torch.zeros_like(param, requires_grad=False)
    return gradient.detach().clone() if shares_memory(gradient) else gradient.detach()


def laid_out_as(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Converts a gradient to its parameter's device and strides, because optimizers are fastest if both match."""
    if gradient.stride() == param.stride() and gradient.device == param.device:
        return gradient
    return torch.empty_like(param, requires_grad=False).copy_(gradient)


def add(left: Values, right: Values) -> Values:
    """Adds `right` to `left` in place and returns `left`."""
    by_device: dict[torch.device, tuple[Values, Values]] = {}  # a kernel's tensors must all be on one device
    for own, other in zip(left, right, strict=True):
        sums, addends = by_device.setdefault(own.device, ([], []))
        sums.append(own)
        addends.append(other)
    for sums, addends in by_device.values():
        torch._foreach_add_(sums, addends)
    return left


def sum_over_ranks(
    mine: Mapping[Node, Values],
    nodes: Sequence[Sequence[Node]],
    shards: int,
    group: ProcessGroup,
    *,
    in_place: bool = False,
) -> Values:
    """Returns the sum over all shards, bitwise equal on all ranks and for any number of ranks.

    Args:
        mine: the sums of this rank's nodes, with the same dtypes and shapes on all ranks. In a group of one rank, the
            result may be one of these objects.
        nodes: the nodes of each rank, which together cover every shard once.
        shards: the number of shards.
        group: the process group of the ranks.
        in_place: whether the result may overwrite `mine`; if False, `mine` does not change.
    """
    root = Node(0, shards)
    own = [mine[node] for node in nodes[group.rank()]]
    if group.size() == 1:
        return add_up(root, _added, _no_leaf, dict(zip(nodes[0], own, strict=True)))
    if is_tree_over_ranks(root, nodes) and all(map(group.sums_as_tree, own[0])):
        return _sum_in_core(own[0], group, in_place)
    return _sum_in_slices(own, nodes, root, group)


def _sum_in_core(own: Values, group: ProcessGroup, in_place: bool) -> Values:
    total = own if in_place else [torch.empty_like(tensor) for tensor in own]
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in own):
        indices = [index for index, tensor in enumerate(own) if (tensor.dtype, tensor.device) == kind]
        group.sum_as_tree([total[index] for index in indices], [own[index] for index in indices])
    return total


def _sum_in_slices(own: Sequence[Values], nodes: Sequence[Sequence[Node]], root: Node, group: ProcessGroup) -> Values:
    # A rank without shards cannot derive the dtypes and shapes from its own values.
    like = own[0] if all(nodes) else _announced(own, nodes, group)
    flat, sums = [pack(values) for values in own], {}
    for kind, length in lengths_of(like).items():
        dtype, device = kind
        empty = torch.empty(0, dtype=dtype, device=device)
        sums[kind] = _sum_of_kind([values[kind] for values in flat], nodes, root, group, empty, length)
    return unpack(sums, like)


def _added(left: Values, right: Values) -> Values:
    """Returns the sum in new memory, because the operands may be needed again."""
    return add([tensor.clone() for tensor in left], right)


def _announced(own: Sequence[Values], nodes: Sequence[Sequence[Node]], group: ProcessGroup) -> Values:
    """Returns meta tensors with the values' dtypes and shapes, as broadcast by the first rank with shards.

    A meta tensor is a placeholder for a CPU tensor, so ranks without shards support only values on the CPU.
    """
    first = next(rank for rank, theirs in enumerate(nodes) if theirs)
    specs = [[(str(value.dtype).removeprefix("torch."), list(value.shape)) for value in own[0]] if own else []]
    broadcast_object_list(specs, group_src=first, group=group)
    return [torch.empty(shape, dtype=getattr(torch, name), device="meta") for name, shape in specs[0]]


def _sum_of_kind(
    own: Sequence[torch.Tensor],
    nodes: Sequence[Sequence[Node]],
    root: Node,
    group: ProcessGroup,
    like: torch.Tensor,
    length: int,
) -> torch.Tensor:
    size, rank = group.size(), group.rank()
    slice_length = -(-length // size)
    bounds = [(min(length, r * slice_length), min(length, (r + 1) * slice_length)) for r in range(size)]
    inputs = [[value[start:stop] for value in own] for start, stop in bounds]
    width = bounds[rank][1] - bounds[rank][0]
    outputs = [[like.new_empty(width) for _ in theirs] for theirs in nodes]
    group.all_to_all(outputs, inputs)
    known = dict(zip(chain(*nodes), chain(*outputs), strict=True))
    total = add_up(root, torch.Tensor.add_, _no_leaf, known)
    if width < slice_length:
        total = torch.cat([total, like.new_zeros(slice_length - width)])
    whole = like.new_empty(slice_length * size)
    group.all_gather(list(whole.split(slice_length)), total)
    return whole[:length]


def _no_leaf(shard: int) -> NoReturn:
    raise AssertionError(f"no rank has shard {shard}")
