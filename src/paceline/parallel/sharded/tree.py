"""The order in which the values of S shards are added, and which part of that each rank can do alone.

It is a pairwise tree over the shards' numbers, like the core's over ranks: ((0 1) (2 3)) ((4 5) ...). A node of the
tree is the run of shards below it, so it has the same value whichever rank computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """The shards from `first` to before `stop`."""

    first: int
    stop: int

    @property
    def halves(self) -> tuple[Node, Node]:
        """The two nodes whose sum this one is, if it has more than one shard."""
        half = 1 << ((self.stop - self.first - 1).bit_length() - 1)
        return Node(self.first, self.first + half), Node(self.first + half, self.stop)


def run_of_rank(shards: int, num_ranks: int, rank: int) -> range:
    """Returns the consecutive shards that a rank computes.

    >>> [list(run_of_rank(8, 3, rank)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    each, more = divmod(shards, num_ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def nodes_within(run: range, node: Node) -> list[Node]:
    """Returns the largest nodes at or below `node` within `run`: those that can be added without other ranks.

    There is only one node if the number of ranks is a power of two that divides the number of shards.

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
    """Returns whether the sum over all shards is the pairwise tree over ranks of one node each.

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
    """Returns the value of `node`: a known one, that of a single shard, or the sum of its halves, the left one first.

    The sum is computed depth first, so that at most one value for each level of the tree is held at a time.
    """
    if node in known:
        return known[node]
    if node.stop - node.first == 1:
        return leaf(node.first)
    left, right = node.halves
    return add(add_up(left, add, leaf, known), add_up(right, add, leaf, known))
