"""Where the elements that an optimizer's shard holds, in the order of memory, are in the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from paceline.checkpoint.format.regions import Box, Flat, Region


@dataclass(frozen=True)
class RunPart:
    """A part of a run of elements: the elements `start` to `stop` of the run are those of `region`.

    `in_memory` is the shape that they have in memory; `order` says which dimension of that is which of the tensor.
    """

    start: int
    stop: int
    region: Region
    in_memory: tuple[int, ...]
    order: tuple[int, ...]

    def row_major(self, run: torch.Tensor) -> torch.Tensor:
        """Returns the part's elements as the region has them, given the run; copies them if their order differs."""
        return run[self.start : self.stop].view(self.in_memory).permute(self.order).contiguous().view(-1)

    def fill(self, run: torch.Tensor, elements: torch.Tensor) -> None:
        """Puts the region's elements into the run."""
        permuted = run[self.start : self.stop].view(self.in_memory).permute(self.order)
        permuted.copy_(elements.view(permuted.shape))


def parts_of_run(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> list[RunPart]:
    """Returns where the elements `start` to `stop` in the order of memory are, for a tensor that fills its memory.

    >>> [part.region for part in parts_of_run([2, 3], [3, 1], 1, 5)]
    [Flat(start=1, stop=5)]
    >>> [part.region for part in parts_of_run([2, 3], [1, 2], 1, 4)]
    [Box(offset=(1, 0), shape=(1, 1)), Box(offset=(0, 1), shape=(2, 1))]
    """
    dims = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1, dim))
    lengths = [shape[dim] for dim in dims]
    expected = [prod(lengths[at + 1 :]) for at in range(len(lengths))]
    if all(shape[dim] == 1 or dim == at for at, dim in enumerate(dims)):
        return [RunPart(0, stop - start, Flat(start, stop), (stop - start,), (0,))]
    assert all(length == 1 or strides[dim] == step for dim, length, step in zip(dims, lengths, expected, strict=True))
    order = tuple(dims.index(dim) for dim in range(len(shape)))
    parts = []
    for offset, extent in _blocks(lengths, start, stop):
        first = sum(at * step for at, step in zip(offset, expected, strict=True)) - start
        box = Box(tuple(offset[at] for at in order), tuple(extent[at] for at in order))
        parts.append(RunPart(first, first + prod(extent), box, tuple(extent), order))
    return parts


def _blocks(shape: Sequence[int], start: int, stop: int) -> list[tuple[list[int], list[int]]]:
    """Cuts a range of elements of a row-major tensor into blocks, each as an offset and a shape, in ascending order."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [([start], [stop - start])]
    row = prod(shape[1:])
    blocks: list[tuple[list[int], list[int]]] = []
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the range lies within a row
        return [
            ([last, *offset], [1, *extent]) for offset, extent in _blocks(shape[1:], start % row, stop - last * row)
        ]
    if start < first * row:
        at = start // row
        blocks += [([at, *o], [1, *e]) for o, e in _blocks(shape[1:], start - at * row, row)]
    if first < last:
        blocks.append(([first, *[0] * (len(shape) - 1)], [last - first, *shape[1:]]))
    if last * row < stop:
        blocks += [([last, *o], [1, *e]) for o, e in _blocks(shape[1:], 0, stop - last * row)]
    return blocks
