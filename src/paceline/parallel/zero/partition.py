"""Which rank owns which parameter."""

from __future__ import annotations

from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Gives each parameter, largest first, to the rank that has least so far; the same partition as torch's.

    Greedy by size, largest first, is never more than 4/3 of the best partition (Graham 1969). Whole parameters are
    given, so that optimizers which look at a parameter as a whole work as they are; it follows that no rank has less
    than the largest parameter takes.

    Args:
        sizes: elements of each parameter of a group.
        loads: elements that each rank has already; brought up to date.

    >>> assign_owners([1, 5, 2, 2], loads := [0, 0]), loads
    ([1, 0, 1, 1], [5, 5])
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += sizes[index]
    return owners
