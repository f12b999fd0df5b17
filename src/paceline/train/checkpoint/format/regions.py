"""Tensor regions: runs of elements in the flattened tensor (`Flat`), and blocks (`TensorBlock`).

`untiled` checks that regions cover a whole tensor exactly once, and `copies` finds the elements that two regions share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from operator import mul
from typing import NamedTuple

import msgspec


class Flat(msgspec.Struct, frozen=True, tag=True):
    """The elements `start` (inclusive) to `stop` (exclusive) of the flattened tensor."""

    start: int
    stop: int


class TensorBlock(msgspec.Struct, frozen=True, tag="Box"):
    """A block of a tensor, with the given shape and offset. Its elements are stored in row-major order."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


Region = Flat | TensorBlock
_MOST_COMPARISONS = 4_000_000  # maximum number of comparisons between irregular blocks; they take a few seconds


def whole(shape: tuple[int, ...]) -> Flat:
    """Returns the region that covers a whole tensor."""
    return Flat(0, prod(shape))


def count(region: Region) -> int:
    """Returns the number of elements in a region."""
    return region.stop - region.start if isinstance(region, Flat) else prod(region.shape)


def fault_of(region: Region, shape: tuple[int, ...]) -> str | None:
    """Returns the reason why a region cannot belong to a tensor with this shape, or None if it can."""
    if isinstance(region, Flat):
        if 0 <= region.start <= region.stop <= prod(shape):
            return None
        return f"elements {region.start} to {region.stop} of a tensor of {prod(shape)}"
    if len(region.offset) != len(shape) or len(region.shape) != len(shape):
        return f"a block of {len(region.shape)} dimensions in a tensor of {len(shape)}"
    for axis, (first, extent, size) in enumerate(zip(region.offset, region.shape, shape, strict=True)):
        if first < 0 or extent < 0 or first + extent > size:
            return f"{first} to {first + extent} of {size} in dimension {axis}"
    return None


def blocks(shape: Sequence[int], start: int, stop: int) -> list[TensorBlock]:
    """Divides the elements `start` to `stop` of a row-major tensor into blocks, in ascending order.

    >>> blocks([2, 3], 1, 6)
    [TensorBlock(offset=(0, 1), shape=(1, 2)), TensorBlock(offset=(1, 0), shape=(1, 3))]
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [TensorBlock((start,), (stop - start,))]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the range of whole rows
    if first > last:  # the elements are within one row
        return _in_row(last, blocks(shape[1:], start % row, stop - last * row))
    cut: list[TensorBlock] = []
    if start < first * row:
        cut += _in_row(first - 1, blocks(shape[1:], start - (first - 1) * row, row))
    if first < last:
        cut.append(TensorBlock((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row < stop:
        cut += _in_row(last, blocks(shape[1:], 0, stop - last * row))
    return cut


def _in_row(row: int, cut: list[TensorBlock]) -> list[TensorBlock]:
    return [TensorBlock((row, *block.offset), (1, *block.shape)) for block in cut]


def moved(block: TensorBlock, by: Sequence[int]) -> TensorBlock:
    """Returns a block shifted by an offset."""
    return TensorBlock(tuple(first + more for first, more in zip(block.offset, by, strict=True)), block.shape)


def cut_out(region: Region, start: int, stop: int) -> list[Region]:
    """Returns the regions that contain the elements `start` to `stop` of a given region, in order.

    >>> cut_out(Flat(10, 20), 2, 5)
    [Flat(start=12, stop=15)]
    >>> cut_out(TensorBlock((0, 4), (3, 2)), 1, 4)
    [TensorBlock(offset=(0, 5), shape=(1, 1)), TensorBlock(offset=(1, 4), shape=(1, 2))]
    """
    if isinstance(region, Flat):
        return [Flat(region.start + start, region.start + stop)]
    return [moved(block, region.offset) for block in blocks(region.shape, start, stop)]


def simplified(region: Region, shape: tuple[int, ...]) -> Region:
    """Converts a region to `Flat` if its elements are contiguous in the flattened tensor, or returns it unchanged."""
    if isinstance(region, Flat):
        return region
    first_two = _runs_of_block(region, shape)
    run = next(first_two, (0, 0))
    return Flat(*run) if next(first_two, None) is None else region


def runs(region: Region, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields the ranges of the flattened tensor that a region covers, in ascending order."""
    if isinstance(region, Flat):
        if region.stop > region.start:
            yield region.start, region.stop
    else:
        yield from _runs_of_block(region, shape)


def _runs_of_block(block: TensorBlock, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    if prod(block.shape) == 0:
        return
    for begin, _, nelements in _copies_of_block(block, _order_of(whole(shape), shape), _order_of(block, shape)):
        yield begin, begin + nelements


def _begins(start: int, outer: list[tuple[int, int]]) -> Iterator[int]:
    """Yields the first element of each run, given the extent and the stride in each outer dimension."""
    if not outer:
        yield start
        return
    (extent, stride), *inner = outer
    for index in range(extent):
        yield from _begins(start + index * stride, inner)


def untiled(shape: tuple[int, ...], regions: Sequence[Region]) -> str | None:
    """Returns the reason why regions do not cover a tensor exactly once, or None if they do."""
    for region in regions:
        if (fault := fault_of(region, shape)) is not None:
            return fault
    held = [simplified(region, shape) for region in regions if count(region) > 0]
    flat = sorted((region.start, region.stop) for region in held if isinstance(region, Flat))
    if len(flat) == len(held):
        return _untiled_runs(prod(shape), flat)
    tensor_blocks = [region for region in held if isinstance(region, TensorBlock)]
    for start, stop in flat:
        tensor_blocks += blocks(shape, start, stop)
    return _untiled_blocks(shape, tensor_blocks)


def _untiled_runs(total: int, ascending: Sequence[tuple[int, int]]) -> str | None:
    end = 0
    for start, stop in ascending:
        if start > end:
            return f"no rank holds the elements {end} to {start}"
        if start < end:
            return f"the elements {start} to {min(end, stop)} are held twice"
        end = stop
    return f"no rank holds the elements {end} to {total}" if end < total else None


def _untiled_blocks(shape: tuple[int, ...], tensor_blocks: list[TensorBlock]) -> str | None:
    """Returns the reason why blocks do not cover a tensor exactly once, or None if they do.

    Blocks cover a tensor if no two of them overlap and their volumes add up to its size. The blocks of a grid never
    overlap. Other blocks are compared with those that overlap with them in the first dimension.
    """
    held, total = sum(map(count, tensor_blocks)), prod(shape)
    if held == total and is_grid(shape, tensor_blocks):
        return None
    open_blocks: list[TensorBlock] = []
    comparisons = 0
    for block in sorted(tensor_blocks, key=lambda block: block.offset):
        open_blocks = [other for other in open_blocks if other.offset[0] + other.shape[0] > block.offset[0]]
        comparisons += len(open_blocks)
        if comparisons > _MOST_COMPARISONS:
            return f"its {len(tensor_blocks)} blocks are too irregular to check"
        for other in open_blocks:
            if blocks_overlap(block, other):
                return f"the blocks at {list(other.offset)} and at {list(block.offset)} overlap"
        open_blocks.append(block)
    return f"no rank holds {total - held} of the {total} elements" if held < total else None


def is_grid(shape: tuple[int, ...], tensor_blocks: Sequence[TensorBlock]) -> bool:
    """Returns True if non-empty blocks are different cells of a grid, so that no two of them overlap."""
    if len({block.offset for block in tensor_blocks}) < len(tensor_blocks):
        return False
    begins = [sorted({block.offset[axis] for block in tensor_blocks}) for axis in range(len(shape))]
    ends = [dict(zip(axis, [*axis[1:], whole], strict=True)) for axis, whole in zip(begins, shape, strict=True)]
    return all(
        first + size == end[first]
        for block in tensor_blocks
        for first, size, end in zip(block.offset, block.shape, ends, strict=True)
    )


def blocks_overlap(one: TensorBlock, other: TensorBlock) -> bool:
    """Returns True if two blocks of a tensor have an element in common."""
    return all(
        first < second + extent and second < first + size
        for first, size, second, extent in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


class RegionCopy(NamedTuple):
    """A copy of `nelements` elements from index `source` of the held region to index `target` of the wanted region."""

    source: int
    target: int
    nelements: int


def copies(shape: tuple[int, ...], held: Region, wanted: Region) -> Iterator[RegionCopy]:
    """Yields the copies that fill the region `wanted` from `held`, with ascending source and target indices.

    A block can have a run for each row of the tensor, so the copies are computed one at a time.
    """
    held, wanted = simplified(held, shape), simplified(wanted, shape)
    if isinstance(held, Flat) and isinstance(wanted, Flat):
        start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        if start < stop:
            yield RegionCopy(start - held.start, start - wanted.start, stop - start)
        return
    before: RegionCopy | None = None
    for common in _common_blocks(shape, held, wanted):
        for copy in _copies_of_block(common, _order_of(held, shape), _order_of(wanted, shape)):
            if before is None:
                before = copy
            elif (before.source + before.nelements, before.target + before.nelements) == copy[:2]:
                before = before._replace(nelements=before.nelements + copy.nelements)
            else:
                yield before
                before = copy
    if before is not None:
        yield before


def count_common(shape: tuple[int, ...], held: Region, wanted: Region) -> int:
    """Returns the number of elements that two regions of a tensor have in common."""
    if isinstance(held, Flat) and isinstance(wanted, Flat):
        return max(0, min(held.stop, wanted.stop) - max(held.start, wanted.start))
    return sum(map(count, _common_blocks(shape, held, wanted)))


def _common_blocks(shape: tuple[int, ...], held: Region, wanted: Region) -> Iterator[TensorBlock]:
    """Yields the blocks that two regions have in common, in ascending order; at most one region may be `Flat`."""
    for one in _as_blocks(held, shape):
        for other in _as_blocks(wanted, shape):
            if blocks_overlap(one, other):
                pairs = list(zip(one.offset, one.shape, other.offset, other.shape, strict=True))
                offset = tuple(max(first, second) for first, _, second, _ in pairs)
                ends = (min(first + size, second + extent) for first, size, second, extent in pairs)
                extents = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
                if 0 not in extents:
                    yield TensorBlock(offset, extents)


def _as_blocks(region: Region, shape: tuple[int, ...]) -> list[TensorBlock]:
    if isinstance(region, TensorBlock):
        return [region]
    return blocks(shape, region.start, region.stop) if shape else [TensorBlock((), ())] * (region.stop - region.start)


class _ElementOrder(NamedTuple):
    """The order of a region's elements in its buffer: the element at index `i` of the tensor is at `first + i·strides`.

    `first` is the position in the buffer of the tensor's first element, which may be outside the region.
    """

    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _order_of(region: Region, shape: tuple[int, ...]) -> _ElementOrder:
    extents = shape if isinstance(region, Flat) else region.shape
    strides = tuple(prod(extents[dim + 1 :]) for dim in range(len(extents)))
    if isinstance(region, Flat):
        return _ElementOrder(-region.start, extents, strides)
    return _ElementOrder(-sum(map(mul, region.offset, strides)), extents, strides)


def _copies_of_block(block: TensorBlock, held: _ElementOrder, wanted: _ElementOrder) -> Iterator[RegionCopy]:
    """Yields a copy for each run of a block's elements that is contiguous in both orders."""
    axis = len(block.shape) - 1
    while axis > 0 and block.shape[axis] == held.shape[axis] == wanted.shape[axis]:
        axis -= 1
    nelements = prod(block.shape[axis:])
    source = held.first + sum(map(mul, block.offset, held.strides))
    target = wanted.first + sum(map(mul, block.offset, wanted.strides))
    sources = _begins(source, list(zip(block.shape[:axis], held.strides, strict=False)))
    targets = _begins(target, list(zip(block.shape[:axis], wanted.strides, strict=False)))
    for begin, end in zip(sources, targets, strict=True):
        yield RegionCopy(begin, end, nelements)
