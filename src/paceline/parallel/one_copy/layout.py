"""Where the averages of a step's gradients lie, and what a rank reads to make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from paceline.engine.codes import DTYPE_CODES
from paceline.parallel.one_copy.shards import SharedShards, SumRound
from paceline.parallel.one_copy.slices import Run
from paceline.parallel.zero.partition import ALIGNMENT_BYTES
from paceline.parallel.zero.shards import Shard


@dataclass(frozen=True)
class Reads:
    """What a rank contributes to the slice of one rank: for each run the parameter, and where and how long it is.

    `padding` is the number of bytes of zeros that follow, since all slices of a round are equally long.
    """

    places: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    padding: int

    def pieces(self, addresses: Sequence[int], zeros: int) -> list[int]:
        """Returns the address and the number of bytes of each run, given the addresses of the gradients.

        Args:
            addresses: of each parameter's gradient, 0 without one.
            zeros: the address of zeros that stand in for missing gradients.
        """
        pieces = [0] * (2 * len(self.places))
        pieces[0::2] = [
            addresses[place] + offset if addresses[place] else zeros
            for place, offset in zip(self.places, self.offsets, strict=True)
        ]
        pieces[1::2] = self.sizes
        if self.padding:
            pieces += (zeros, self.padding)
        return pieces


@dataclass(frozen=True, eq=False)
class ReadyRound:
    """A round, with the memory for its results.

    Attributes:
        dtype_code: the type.
        reads: what this rank contributes to each rank's slice.
        sums: this rank's slice of the results.
        averages: what this rank updates, and the part of `sums` that is its gradient.
    """

    dtype_code: int
    reads: Sequence[Reads]
    sums: torch.Tensor
    averages: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @cached_property
    def updated(self) -> frozenset[int]:
        """The ids of what this rank updates."""
        return frozenset(id(each) for each, _ in self.averages)


@dataclass(frozen=True)
class Layout:
    """The rounds of a step, and the bytes of the longest padding and of the longest run in them."""

    rounds: Sequence[ReadyRound]
    longest_padding: int
    longest_run: int


def lay_out(shards: SharedShards, present: Sequence[bool], whole: bool) -> Layout:
    """Returns the rounds for those parameters that have a gradient on some rank.

    Args:
        shards: what each rank owns.
        present: for each parameter, whether it has a gradient.
        whole: whether the results of every round have memory of their own; otherwise they share it.
    """
    rounds = [_only(each, present) for each in shards.rounds]
    rounds = [each for each in rounds if any(each.runs)]
    counts = [max(sum(run.numel for run in owned) for owned in each.runs) for each in rounds]
    needed = [_aligned(count * each.dtype.itemsize) for each, count in zip(rounds, counts, strict=True)]
    memory = torch.empty(sum(needed) if whole else max(needed, default=0), dtype=torch.uint8)
    ready, at = [], 0
    for each, count, nbytes in zip(rounds, counts, needed, strict=True):
        sums = memory[at : at + count * each.dtype.itemsize].view(each.dtype)
        ready.append(
            ReadyRound(
                DTYPE_CODES[each.dtype],
                [_reads(owned, count, each.dtype.itemsize) for owned in each.runs],
                sums,
                _averages(each.runs[shards.rank], shards, sums),
            )
        )
        at += nbytes if whole else 0
    reads = [reads for each in ready for reads in each.reads]
    longest_run = max((size for each in reads for size in each.sizes), default=0)
    return Layout(ready, max((each.padding for each in reads), default=0), longest_run)


def _only(each: SumRound, present: Sequence[bool]) -> SumRound:
    return SumRound(each.dtype, [[run for run in owned if present[run.param]] for owned in each.runs])


def _reads(owned: Sequence[Run], count: int, item: int) -> Reads:
    return Reads(
        [run.param for run in owned],
        [run.start * item for run in owned],
        [run.numel * item for run in owned],
        (count - sum(run.numel for run in owned)) * item,
    )


def _averages(
    owned: Sequence[Run], shards: SharedShards, sums: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    averages, at = [], 0
    for run in owned:
        shard = _shard_of(run, shards)
        assert shard.updated is not None
        average = sums[at : at + run.numel]
        if shard.is_whole:
            average = average.as_strided(shard.shape, shard.strides, average.storage_offset())
        averages.append((shard.updated, average))
        at += run.numel
    return averages


def _shard_of(run: Run, shards: SharedShards) -> Shard:
    first = run.start * shards.by_param[run.param][0].param.element_size()
    return next(shard for shard in shards.by_param[run.param] if shard.part.start == first)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
