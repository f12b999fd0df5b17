"""The shards of a model that ranks share, and the rounds in which they are updated.

Decides which rank updates which elements of which parameter, and in which order.

Parameters of one type are taken as one long row, which is cut into rounds, and each round into one slice a rank. In a
round every rank receives the gradients of its slice from the others and updates the slice at once, while they are in
the cache.

Where the averages of a step's gradients lie, and what a rank reads to make them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn

from paceline.comm.engine.codes import DTYPE_CODES
from paceline.train.zero.shards import ALIGNMENT_BYTES, OwnedBytes, Shard, Shards, assign_to_ranks


class ElementRun(NamedTuple):
    """The elements of a parameter from `start` to before `stop`; `param` is its number."""

    param: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


Round = list[list[ElementRun]]  # the runs of each rank


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
    [[[ElementRun(param=0, start=0, stop=4), ElementRun(param=1, start=0, stop=4)], [ElementRun(param=1, start=4, stop=12)]]]
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
    [[[ElementRun(param=1, start=0, stop=5)], [ElementRun(param=0, start=0, stop=3), ElementRun(param=2, start=0, stop=2)]]]
    """
    owned: Round = [[] for _ in range(ranks)]
    for param, parts in enumerate(assign_to_ranks(sizes, [False] * len(sizes), [0] * ranks)):
        owned[parts[0].owner].append(ElementRun(param, 0, sizes[param]))
    return [owned]


def _nearest_cut(wanted: int, sizes: Sequence[int], ends: Sequence[int], alignment: int) -> int:
    """Returns the place in the row nearest to `wanted` where it may be cut."""
    param = bisect.bisect_right(ends, wanted)
    first = ends[param] - sizes[param]
    return first + min(sizes[param], (wanted - first + alignment // 2) // alignment * alignment)


def _runs_between(first: int, stop: int, sizes: Sequence[int], ends: Sequence[int]) -> list[ElementRun]:
    runs = []
    param = bisect.bisect_right(ends, first)
    while first < stop:
        begins = ends[param] - sizes[param]
        until = min(stop, ends[param])
        if first < until:
            runs.append(ElementRun(param, first - begins, until - begins))
        first = until
        param += 1
    return runs


# The more rounds, the less memory the averages need, and the more of it stays in the cache; but in each round ranks
# wait for each other.
_ROUNDS = 5
_MOST_ROUND_BYTES = 32 << 20


@dataclass(frozen=True)
class SumRound:
    """Gradients of one type that are summed together; `runs[r]` are those of rank r, with the places of parameters."""

    dtype: torch.dtype
    runs: Sequence[Sequence[ElementRun]]


class SharedShards(Shards):
    """The shards of an optimizer's parameters, which are the same on every host.

    Args:
        rank: this rank's place among those of its host.
        size: the number of ranks on a host.
        cuts: whether parameters may be cut; otherwise each has one owner.
        least_round_bytes: of gradients that are summed together, where parameters may be cut.
    """

    def __init__(self, rank: int, size: int, cuts: bool, least_round_bytes: int) -> None:
        super().__init__(rank, size, cuts)
        self._size = size
        self._least_round_bytes = least_round_bytes
        self.rounds: list[SumRound] = []

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Divides further parameters; those that were added before keep their owners."""
        first = len(self.by_param)
        parts: list[list[OwnedBytes]] = [[] for _ in params]
        for trained in (True, False):  # apart, so that both the states and the memory of gradients are divided evenly
            for dtype in dict.fromkeys(param.dtype for param in params):
                chosen = [at for at, each in enumerate(params) if each.requires_grad == trained and each.dtype == dtype]
                for runs in self._divide([params[at].numel() for at in chosen], dtype):
                    placed = [[run._replace(param=chosen[run.param]) for run in owned] for owned in runs]
                    for owner, owned in enumerate(placed):
                        for run in owned:
                            item = dtype.itemsize
                            parts[run.param].append(OwnedBytes(run.start * item, run.stop * item, owner))
                    placed = [[run._replace(param=first + run.param) for run in owned] for owned in placed]
                    self.rounds.append(SumRound(dtype, placed))
        for param, its_parts in zip(params, parts, strict=True):
            self.by_param.append([self._shard(param, part) for part in its_parts or [OwnedBytes(0, 0, 0)]])

    def _divide(self, sizes: Sequence[int], dtype: torch.dtype) -> list[list[list[ElementRun]]]:
        if not self.cuts:
            return divide_whole(sizes, self._size)
        wanted = min(sum(sizes) * dtype.itemsize // _ROUNDS, _MOST_ROUND_BYTES)
        round_size = max(wanted, self._least_round_bytes) // dtype.itemsize
        return cut_evenly(sizes, self._size, round_size, ALIGNMENT_BYTES // dtype.itemsize)

    def _shard(self, param: torch.Tensor, part: OwnedBytes) -> Shard:
        shard = Shard(param, part, self.rank)
        # Not the parameter itself, which has this rank's own gradient, and whose version shows who else writes to it.
        shard.updated = nn.Parameter(shard.run(param.data), param.requires_grad) if shard.is_mine else None
        return shard


@dataclass(frozen=True)
class SliceReads:
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
    reads: Sequence[SliceReads]
    sums: torch.Tensor
    averages: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @cached_property
    def updated(self) -> frozenset[int]:
        """The ids of what this rank updates."""
        return frozenset(id(each) for each, _ in self.averages)


@dataclass(frozen=True)
class RoundLayout:
    """The rounds of a step, and the bytes of the longest padding and of the longest run in them."""

    rounds: Sequence[ReadyRound]
    longest_padding: int
    longest_run: int


def lay_out(shards: SharedShards, present: Sequence[bool], whole: bool) -> RoundLayout:
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
    return RoundLayout(ready, max((each.padding for each in reads), default=0), longest_run)


def _only(each: SumRound, present: Sequence[bool]) -> SumRound:
    return SumRound(each.dtype, [[run for run in owned if present[run.param]] for owned in each.runs])


def _reads(owned: Sequence[ElementRun], count: int, item: int) -> SliceReads:
    return SliceReads(
        [run.param for run in owned],
        [run.start * item for run in owned],
        [run.numel * item for run in owned],
        (count - sum(run.numel for run in owned)) * item,
    )


def _averages(
    owned: Sequence[ElementRun], shards: SharedShards, sums: torch.Tensor
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


def _shard_of(run: ElementRun, shards: SharedShards) -> Shard:
    first = run.start * shards.by_param[run.param][0].param.element_size()
    return next(shard for shard in shards.by_param[run.param] if shard.part.start == first)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
