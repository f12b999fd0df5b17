"""Assignment of each byte to exactly one rank, which writes it.

Each rank computes the same assignment from the same numbers, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.regions import Region, untiled

ALIGNMENT_NBYTES = 1 << 20  # alignment of cuts within a tensor; smaller tensors are not cut


class ByteRange(NamedTuple):
    """The bytes of item number `item` from `start` (inclusive) to `stop` (exclusive)."""

    item: int
    start: int
    stop: int


def assign_bytes(
    sizes: Sequence[int], loads: Sequence[int], alignment: int = ALIGNMENT_NBYTES
) -> list[list[ByteRange]]:
    """Assigns the bytes of items to ranks such that all ranks have about the same total.

    The items are concatenated, and cut at multiples of `alignment` within an item, or between items.

    Args:
        sizes: the size of each item, in bytes.
        loads: the number of bytes that each rank already has.
        alignment: the granularity of cuts, in bytes.

    Returns:
        The ranges of each rank. Each empty item is also assigned to one rank.

    >>> assign_bytes([4, 8], [0, 0], alignment=2)  # doctest: +NORMALIZE_WHITESPACE
    [[ByteRange(item=0, start=0, stop=4), ByteRange(item=1, start=0, stop=2)],
     [ByteRange(item=1, start=2, stop=8)]]
    >>> assign_bytes([4, 8], [0, 12], alignment=2)
    [[ByteRange(item=0, start=0, stop=4), ByteRange(item=1, start=0, stop=8)], []]
    """
    limits = list(accumulate(_quotas(sum(sizes), loads)))
    assigned: list[list[ByteRange]] = [[] for _ in loads]
    rank = first = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size or size == 0:
            while rank + 1 < len(loads) and first + start >= limits[rank]:
                rank += 1
            stop = size if rank + 1 == len(loads) else _cut(limits[rank] - first, size, alignment)
            if stop > start or size == 0:
                assigned[rank].append(ByteRange(index, start, stop))
            elif rank + 1 < len(loads):
                rank += 1
            start = max(start, stop)
            if size == 0:
                break
        first += size
    return assigned


def _cut(wanted: int, size: int, alignment: int) -> int:
    """Returns the offset nearest to `wanted` at which an item may be cut."""
    if wanted >= size:
        return size
    cut = (wanted + alignment // 2) // alignment * alignment
    return size if cut >= size or (size <= alignment and 2 * wanted >= size) else cut


def _quotas(total: int, loads: Sequence[int]) -> list[int]:
    """Divides `total` bytes among the ranks such that the largest resulting load is as small as possible.

    >>> _quotas(6, [0, 4, 20])
    [5, 1, 0]
    """
    sharing = sorted(range(len(loads)), key=lambda rank: loads[rank])
    while sharing:
        level = (total + sum(loads[rank] for rank in sharing)) / len(sharing)
        if loads[sharing[-1]] <= level:
            break
        sharing.pop()
    quotas = [0] * len(loads)
    for rank in sharing:
        quotas[rank] = round(level) - loads[rank]
    return quotas


@dataclass(frozen=True)
class Offer:
    """A region of a tensor that a rank has and other ranks may also have.

    Attributes:
        name: the name of the tensor.
        dtype: the safetensors name of the tensor's dtype.
        shape: the shape of the whole tensor.
        region: the location of the elements in the whole tensor.
        nbytes: the size of the region in bytes.
        of_first: whether the elements may differ between ranks. If so, those on the first rank are written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    nbytes: int
    of_first: bool


def assign_offers(
    offers: Sequence[Sequence[Offer]], loads: Sequence[int], alignment: int = ALIGNMENT_NBYTES
) -> list[list[ByteRange]]:
    """Assigns the bytes of offered regions to the ranks that offer them.

    Regions that few ranks have are assigned first. The regions that many ranks have then balance the loads.

    Args:
        offers: the offers of each rank.
        loads: the number of other bytes that each rank must write.
        alignment: the granularity of cuts, in bytes.

    Returns:
        For each rank, the ranges that it writes; `item` is the index of an offer in the rank's list.

    Raises:
        CheckpointError: the ranks' regions of a tensor do not cover it exactly.
    """
    _require_fit(offers)
    holders: dict[tuple[str, Region], list[tuple[int, int]]] = {}
    for rank, own in enumerate(offers):
        for index, offer in enumerate(own):
            known = holders.setdefault((offer.name, offer.region), [])
            if not (offer.of_first and known):
                known.append((rank, index))
    by_ranks: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
    for held in holders.values():
        by_ranks.setdefault(tuple(rank for rank, _ in held), []).append(held)
    totals, assigned = list(loads), [list[ByteRange]() for _ in offers]
    for ranks in sorted(by_ranks, key=lambda ranks: (len(ranks), ranks)):
        regions = by_ranks[ranks]
        sizes = [offers[held[0][0]][held[0][1]].nbytes for held in regions]
        for member, ranges in enumerate(assign_bytes(sizes, [totals[rank] for rank in ranks], alignment)):
            for item, start, stop in ranges:
                rank, index = regions[item][member]
                assigned[rank].append(ByteRange(index, start, stop))
                totals[rank] += stop - start
    return assigned


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
    for name, ranks_of in regions.items():
        if (fault := untiled(first[name][1].shape, list(ranks_of))) is not None:
            ranks = ", ".join(map(str, sorted(set(ranks_of.values()))))
            raise CheckpointError(
                f"the parts of {name!r} on the ranks {ranks} of the group do not make it up: {fault}. All ranks of the "
                "mesh must save together, and divide the model alike"
            )
