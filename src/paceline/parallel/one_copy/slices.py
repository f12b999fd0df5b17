"""Decides which rank updates which elements of which parameter, and in which order.

Parameters of one type are taken as one long row, which is cut into rounds, and each round into one slice a rank. In a
round every rank receives the gradients of its slice from the others and updates the slice at once, while they are in
the cache.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline.parallel.zero.partition import divide


class Run(NamedTuple):
    """The elements of a parameter from `start` to before `stop`; `param` is its number."""

    param: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


Round = list[list[Run]]  # the runs of each rank


def cut_evenly(sizes: Sequence[int], ranks: int, round_size: int, alignment: int) -> list[Round]:
    """Cuts parameters into rounds of about `round_size` elements, and each round into equal slices.

    A parameter is cut only at multiples of `alignment` elements, so that two ranks never write to one cache line, and
    kernels treat each element as they would in the whole parameter.

    Args:
        sizes: the elements of each parameter.
        ranks: the number of ranks.
        round_size: the elements of a round.
        alignment: the elements by which a cut may be off.

    >>> cut_evenly([4, 12], 2, 16, 2)
    [[[Run(param=0, start=0, stop=4), Run(param=1, start=0, stop=4)], [Run(param=1, start=4, stop=12)]]]
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    if total == 0:
        return []
    rounds = max(1, round(total / round_size))
    slices = rounds * ranks
    cuts = [0, *(_nearest_cut(total * at // slices, sizes, ends, alignment) for at in range(1, slices)), total]
    runs = [_runs_between(first, stop, sizes, ends) for first, stop in pairwise(cuts)]
    return [runs[at : at + ranks] for at in range(0, slices, ranks)]


def divide_whole(sizes: Sequence[int], ranks: int) -> list[Round]:
    """Gives each parameter as a whole to one rank, as evenly as that goes, in a single round.

    >>> divide_whole([3, 5, 2], 2)
    [[[Run(param=1, start=0, stop=5)], [Run(param=0, start=0, stop=3), Run(param=2, start=0, stop=2)]]]
    """
    owned: Round = [[] for _ in range(ranks)]
    for param, parts in enumerate(divide(sizes, [False] * len(sizes), [0] * ranks)):
        owned[parts[0].owner].append(Run(param, 0, sizes[param]))
    return [owned]


def _nearest_cut(wanted: int, sizes: Sequence[int], ends: Sequence[int], alignment: int) -> int:
    """Returns the place in the row nearest to `wanted` where it may be cut."""
    param = bisect.bisect_right(ends, wanted)
    first = ends[param] - sizes[param]
    return first + min(sizes[param], (wanted - first + alignment // 2) // alignment * alignment)


def _runs_between(first: int, stop: int, sizes: Sequence[int], ends: Sequence[int]) -> list[Run]:
    runs = []
    param = bisect.bisect_right(ends, first)
    while first < stop:
        begins = ends[param] - sizes[param]
        until = min(stop, ends[param])
        if first < until:
            runs.append(Run(param, first - begins, until - begins))
        first = until
        param += 1
    return runs
