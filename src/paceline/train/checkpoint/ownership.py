"""Who writes what of a divided model: of a part that several ranks have, each a share.

Deals what every rank has out to the ranks, so that each byte is written, or read, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.regions import Box, Flat, Region, untiled

ALIGNMENT_NBYTES = 1 << 20  # of cuts within a tensor; smaller ones are left whole


class ByteRange(NamedTuple):
    """The bytes of item number `item` from `start` to before `stop`."""

    item: int
    start: int
    stop: int


def assign_bytes(
    sizes: Sequence[int], loads: Sequence[int], alignment: int = ALIGNMENT_NBYTES
) -> list[list[ByteRange]]:
    """Deals items out so that all ranks have about as much to do.

    The items are taken as one long row, which is cut at multiples of `alignment` within an item, or at its ends. Each
    rank computes the same without asking the others.

    Args:
        sizes: the bytes of each item.
        loads: the bytes that each rank has to do besides.
        alignment: the bytes by which a cut may be off.

    Returns:
        What each rank gets. Items of no bytes go to the rank whose turn it is, so that somebody has them.

    >>> assign_bytes([4, 8], [0, 0], alignment=2)
    [[ByteRange(item=0, start=0, stop=4), ByteRange(item=1, start=0, stop=2)], [ByteRange(item=1, start=2, stop=8)]]
    >>> assign_bytes([4, 8], [0, 12], alignment=2)
    [[ByteRange(item=0, start=0, stop=4), ByteRange(item=1, start=0, stop=8)], []]
    """
    rooms = _rooms(sum(sizes), loads)
    limits = list(accumulate(rooms))
    dealt: list[list[ByteRange]] = [[] for _ in loads]
    rank = first = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size or size == 0:
            while rank + 1 < len(loads) and first + start >= limits[rank]:
                rank += 1
            stop = size if rank + 1 == len(loads) else _cut(limits[rank] - first, size, alignment)
            if stop > start or size == 0:
                dealt[rank].append(ByteRange(index, start, stop))
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


@dataclass(frozen=True)
class Offer:
    """A part of a tensor that a rank has, and others may have too.

    Attributes:
        of_first: whether the ranks' may differ, so that the first one's counts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    nbytes: int
    of_first: bool

    def packed(self) -> list[Any]:
        """Returns this as JSON has it."""
        return [self.name, self.dtype, list(self.shape), packed_region(self.region), self.nbytes, self.of_first]

    @staticmethod
    def unpacked(packed: Sequence[Any]) -> Offer:
        """Returns what `packed` was called on."""
        name, dtype, shape, region, nbytes, of_first = packed
        return Offer(name, dtype, tuple(shape), unpacked_region(region), nbytes, of_first)


def packed_region(region: Region) -> list[Any]:
    """Returns a region as JSON has it."""
    if isinstance(region, Flat):
        return [region.start, region.stop]
    return [list(region.offset), list(region.shape)]


def unpacked_region(packed: Sequence[Any]) -> Region:
    """Returns what `packed_region` was given."""
    first, second = packed
    return Box(tuple(first), tuple(second)) if isinstance(first, list) else Flat(first, second)


def assign_offers(
    offers: Sequence[Sequence[Offer]], loads: Sequence[int], alignment: int = ALIGNMENT_NBYTES
) -> list[list[ByteRange]]:
    """Returns which bytes of its offers each rank writes, so that each byte is written once.

    Each rank computes the same without asking the others. What few ranks have is dealt out first, so that what many
    have fills up those that have little to do.

    Args:
        offers: of each rank.
        loads: the bytes that each rank has to write besides.
        alignment: the bytes by which cuts may be off.

    Returns:
        For each rank shares of its offers, by their places in its list.

    Raises:
        CheckpointError: the ranks' parts of a tensor do not fit together.
    """
    _require_fit(offers)
    holders: dict[tuple[str, Region], list[tuple[int, int]]] = {}
    for rank, own in enumerate(offers):
        for at, offer in enumerate(own):
            known = holders.setdefault((offer.name, offer.region), [])
            if not (offer.of_first and known):
                known.append((rank, at))
    by_ranks: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
    for held in holders.values():
        by_ranks.setdefault(tuple(rank for rank, _ in held), []).append(held)
    total, shares = list(loads), [list[ByteRange]() for _ in offers]
    for ranks in sorted(by_ranks, key=lambda each: (len(each), each)):
        parts = by_ranks[ranks]
        sizes = [offers[held[0][0]][held[0][1]].nbytes for held in parts]
        for member, dealt in enumerate(assign_bytes(sizes, [total[rank] for rank in ranks], alignment)):
            for share in dealt:
                rank, at = parts[share.item][member]
                shares[rank].append(ByteRange(at, share.start, share.stop))
                total[rank] += share.stop - share.start
    return shares


def _require_fit(offers: Sequence[Sequence[Offer]]) -> None:
    first: dict[str, tuple[int, Offer]] = {}
    regions: dict[str, dict[Region, int]] = {}
    for rank, own in enumerate(offers):
        for offer in own:
            before, known = first.setdefault(offer.name, (rank, offer))
            if (known.dtype, known.shape) != (offer.dtype, offer.shape):
                raise CheckpointError(
                    f"rank {before} of the group has a part of {offer.name!r} as {known.dtype}{list(known.shape)}, "
                    f"rank {rank} has one as {offer.dtype}{list(offer.shape)}; every rank must save its part of the "
                    "same model"
                )
            regions.setdefault(offer.name, {}).setdefault(offer.region, rank)
    for name, parts in regions.items():
        if (fault := untiled(first[name][1].shape, list(parts))) is not None:
            ranks = ", ".join(map(str, sorted(set(parts.values()))))
            raise CheckpointError(
                f"the parts of {name!r} on the ranks {ranks} of the group do not make it up: {fault}. All ranks of the "
                "mesh must save together, and divide the model alike"
            )
