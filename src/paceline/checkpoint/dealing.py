"""Deals what every rank has out to the ranks, so that each byte is written, or read, once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT_NBYTES = 1 << 20  # of cuts within a tensor; smaller ones are left whole


class Share(NamedTuple):
    """The bytes of item number `item` from `start` to before `stop`."""

    item: int
    start: int
    stop: int


def deal(sizes: Sequence[int], loads: Sequence[int], alignment: int = ALIGNMENT_NBYTES) -> list[list[Share]]:
    """Deals items out so that all ranks have about as much to do.

    The items are taken as one long row, which is cut at multiples of `alignment` within an item, or at its ends. Each
    rank computes the same without asking the others.

    Args:
        sizes: the bytes of each item.
        loads: the bytes that each rank has to do besides.
        alignment: the bytes by which a cut may be off.

    Returns:
        What each rank gets. Items of no bytes go to the rank whose turn it is, so that somebody has them.

    >>> deal([4, 8], [0, 0], alignment=2)
    [[Share(item=0, start=0, stop=4), Share(item=1, start=0, stop=2)], [Share(item=1, start=2, stop=8)]]
    >>> deal([4, 8], [0, 12], alignment=2)
    [[Share(item=0, start=0, stop=4), Share(item=1, start=0, stop=8)], []]
    """
    rooms = _rooms(sum(sizes), loads)
    limits = list(accumulate(rooms))
    dealt: list[list[Share]] = [[] for _ in loads]
    rank = first = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size or size == 0:
            while rank + 1 < len(loads) and first + start >= limits[rank]:
                rank += 1
            stop = size if rank + 1 == len(loads) else _cut(limits[rank] - first, size, alignment)
            if stop > start or size == 0:
                dealt[rank].append(Share(index, start, stop))
            elif rank + 1 < len(loads):
                rank += 1
            start = max(start, stop)
            if size == 0:
                break
        first += size
    return dealt


def _cut(wanted: int, size: int, alignment: int) -> int:
    """Returns the place in an item nearest to `wanted` where it may be cut."""
    if wanted >= size:
        return size
    cut = (wanted + alignment // 2) // alignment * alignment
    return size if cut >= size or (size <= alignment and 2 * wanted >= size) else cut


def _rooms(total: int, loads: Sequence[int]) -> list[int]:
    """Returns how many of `total` bytes each rank gets, so that the fullest is as empty as it can be.

    >>> _rooms(6, [0, 4, 20])
    [5, 1, 0]
    """
    left = sorted(range(len(loads)), key=lambda rank: loads[rank])
    while left:
        level = (total + sum(loads[rank] for rank in left)) / len(left)
        if loads[left[-1]] <= level:
            break
        left.pop()
    rooms = [0] * len(loads)
    for rank in left:
        rooms[rank] = round(level) - loads[rank]
    return rooms
