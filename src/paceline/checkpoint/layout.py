"""Where the elements that an optimizer's shard holds, in the order of memory, are in the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from paceline.checkpoint.format.regions import Box, Flat, Region, blocks, moved


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


def parts_of_run(
    shape: Sequence[int], strides: Sequence[int], start: int, stop: int, begin: Sequence[int] | None = None
) -> list[RunPart]:
    """Returns where the elements `start` to `stop` in the order of memory are, for a tensor that fills its memory.

    Args:
        begin: where the tensor begins in a larger one of which it is a block; the regions are then those of the larger.

    >>> [part.region for part in parts_of_run([2, 3], [3, 1], 1, 5)]
    [Flat(start=1, stop=5)]
    >>> [part.region for part in parts_of_run([2, 3], [1, 2], 1, 4)]
    [Box(offset=(1, 0), shape=(1, 1)), Box(offset=(0, 1), shape=(2, 1))]
    >>> [part.region for part in parts_of_run([2, 3], [3, 1], 0, 3, begin=[4, 6])]
    [Box(offset=(4, 6), shape=(1, 3))]
    """
    dims = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1, dim))
    lengths = [shape[dim] for dim in dims]
    expected = [prod(lengths[at + 1 :]) for at in range(len(lengths))]
    if begin is None and all(shape[dim] == 1 or dim == at for at, dim in enumerate(dims)):
        return [RunPart(0, stop - start, Flat(start, stop), (stop - start,), (0,))]
    assert all(length == 1 or strides[dim] == step for dim, length, step in zip(dims, lengths, expected, strict=True))
    order = tuple(dims.index(dim) for dim in range(len(shape)))
    parts = []
    for block in blocks(lengths, start, stop):
        first = sum(at * step for at, step in zip(block.offset, expected, strict=True)) - start
        box = Box(tuple(block.offset[at] for at in order), tuple(block.shape[at] for at in order))
        region = box if begin is None else moved(box, begin)
        parts.append(RunPart(first, first + prod(block.shape), region, block.shape, order))
    return parts
