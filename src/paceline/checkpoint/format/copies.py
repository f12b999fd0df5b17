"""Which elements of a piece a reader of some part of the tensor needs, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.checkpoint.format.regions import Flat, Region, runs, simplified


@dataclass(frozen=True)
class Copy:
    """`nelements` that are at `source` in the buffer of the region that is held, and at `target` in the wanted one."""

    source: int
    target: int
    nelements: int


def copies(shape: tuple[int, ...], held: Region, wanted: Region) -> list[Copy]:
    """Returns what of one region of a tensor belongs to another, in ascending order of both buffers.

    Args:
        shape: of the tensor.
        held: the region whose elements are there.
        wanted: the region that is to be filled.
    """
    held, wanted = simplified(held, shape), simplified(wanted, shape)
    if isinstance(held, Flat) and isinstance(wanted, Flat):
        start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        return [Copy(start - held.start, start - wanted.start, stop - start)] if start < stop else []
    return _merged(list(runs(held, shape)), list(runs(wanted, shape)))


def _merged(held: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> list[Copy]:
    """Walks through both lists of runs at once; adjacent copies become one."""
    found: list[Copy] = []
    here = there = source = target = 0
    while here < len(held) and there < len(wanted):
        (start, stop), (first, last) = held[here], wanted[there]
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            _add(found, Copy(source + begin - start, target + begin - first, end - begin))
        if stop <= last:
            source += stop - start
            here += 1
        if last <= stop:
            target += last - first
            there += 1
    return found


def _add(found: list[Copy], copy: Copy) -> None:
    if found:
        before = found[-1]
        if before.source + before.nelements == copy.source and before.target + before.nelements == copy.target:
            found[-1] = Copy(before.source, before.target, before.nelements + copy.nelements)
            return
    found.append(copy)
