"""How many shards each member gets: in proportion to its speed, and changed only where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median_low

from paceline.parallel.sharded.tree import Node, is_tree_over_ranks, nodes_within

EVERY = 25  # rounds between two looks at the members' speeds
_WORTH = 0.9  # a new deal must make the longest share shorter than this part of what it is
_WORTH_SLICES = 0.75  # ... if the core adds up the sums now, and could not any more
_NEW = 0.2  # the weight of the latest measurement in a member's speed


def even_counts(shards: int, ranks: int) -> list[int]:
    """Returns how many shards each rank gets if all are equally fast.

    Those that are left over go to the first ranks, or to the last ones if only then the core can add up what the ranks
    have (see `sum_over_ranks`). That is so where few of as many ranks as shards are lost.

    >>> even_counts(8, 3), even_counts(4, 3)
    ([3, 3, 2], [1, 1, 2])
    """
    each, more = divmod(shards, ranks)
    first, last = ([each + (rank in larger) for rank in range(ranks)] for larger in (range(more), range(ranks)[-more:]))
    return last if more and _adds_up_in_core(last) and not _adds_up_in_core(first) else first


def fair_counts(shards: int, shard_ns: Sequence[int], now: Sequence[int]) -> list[int]:
    """Returns how many shards each rank gets; `now` if nothing else is worth the change.

    The longest share is as short as it can be, and every rank has a shard if there are enough.

    Args:
        shards: the number of shards.
        shard_ns: how long a shard takes on each rank, in nanoseconds; 0 for a rank of which that is not known yet.
        now: the number of shards of each rank until now.

    >>> fair_counts(12, [10, 10, 20, 20], [3, 3, 3, 3])
    [4, 4, 2, 2]
    >>> fair_counts(12, [10, 10, 11, 11], [3, 3, 3, 3])
    [3, 3, 3, 3]
    >>> fair_counts(4, [5, 6, 6], [1, 1, 2])
    [1, 1, 2]
    """
    known = [each for each in shard_ns if each > 0]
    if not known:
        return list(now)
    costs = [each if each > 0 else median_low(known) for each in shard_ns]
    counts = [0] * len(costs)
    for at in range(shards):
        idle = [rank for rank, count in enumerate(counts) if count == 0]
        candidates = idle if at < len(costs) else range(len(costs))
        chosen = min(candidates, key=lambda rank: ((counts[rank] + 1) * costs[rank], rank))
        counts[chosen] += 1
    longest = max(count * cost for count, cost in zip(counts, costs, strict=True))
    longest_now = max(count * cost for count, cost in zip(now, costs, strict=True))
    loses_core = _adds_up_in_core(now) and not _adds_up_in_core(counts)
    return counts if longest < (_WORTH_SLICES if loses_core else _WORTH) * longest_now else list(now)


def _adds_up_in_core(counts: Sequence[int]) -> bool:
    """Returns whether the sum over all shards is the tree over ranks with so many shards each."""
    root, stops = Node(0, sum(counts)), [*accumulate(counts)]
    runs = [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
    return is_tree_over_ranks(root, [nodes_within(run, root) for run in runs])


def smoothed(before_ns: int, measured_ns: int) -> int:
    """Returns a member's speed after a measurement, which changes it slowly."""
    return measured_ns if before_ns == 0 else round((1 - _NEW) * before_ns + _NEW * measured_ns)
