"""SharedShards: the shards of a model that ranks share, and the rounds in which they are averaged and updated.

Parameters of one type form one long row, which is cut into rounds, and each round into one slice per rank. In a round
every rank reads the gradients of its slice from the others and updates the slice immediately, while they are in the
cache. `RoundLayout` holds the memory of a step's averages.
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

# More rounds need less memory for the averages, and more of it stays in the cache; but ranks wait for each other in
# each round.
_ROUNDS = 5
_MOST_ROUND_BYTES = 32 << 20


class ElementRun(NamedTuple):
    """The elements `[start, stop)` of parameter number `param`."""

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
        sizes: the number of elements of each parameter.
        ranks: the number of ranks.
        round_size: the number of elements of a round.
        alignment: the number of elements of which cuts are multiples.

    >>> cut_evenly([4, 12], 2, 16, 2)[0][0]
    [ElementRun(param=0, start=0, stop=4), ElementRun(param=1, start=0, stop=4)]
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    if total == 0:
        return []
    rounds = max(1, round(total / round_size))
    slices = rounds * ranks
    cuts = [0, *(_nearest_cut(total * index // slices, sizes, ends, alignment) for index in range(1, slices)), total]
    runs = [_runs_between(first, stop, sizes, ends) for first, stop in pairwise(cuts)]
    return [runs[first : first + ranks] for first in range(0, slices, ranks)]


def divide_whole(sizes: Sequence[int], ranks: int) -> list[Round]:
    """Assigns whole parameters to ranks, as evenly as possible, in a single round.

    >>> divide_whole([3, 5], 2)
    [[[ElementRun(param=1, start=0, stop=5)], [ElementRun(param=0, start=0, stop=3)]]]
    """
    owned: Round = [[] for _ in range(ranks)]
    for param, parts in enumerate(assign_to_ranks(sizes, [False] * len(sizes), [0] * ranks)):
        owned[parts[0].owner].append(ElementRun(param, 0, sizes[param]))
    return [owned]


def _nearest_cut(wanted: int, sizes: Sequence[int], ends: Sequence[int], alignment: int) -> int:
    """Returns the permitted cut of the row that is nearest to `wanted`."""
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


@dataclass(frozen=True)
class SumRound:
    """Gradients of one type that are summed together; `runs[r]` are those of rank r, with the indices of parameters."""

    dtype: torch.dtype
    runs: Sequence[Sequence[ElementRun]]


class SharedShards(Shards):
    """The shards of an optimizer's parameters, which are the same on every host.

    Args:
        rank: the index of this rank among those of its host.
        size: the number of ranks on a host.
        cuts: whether parameters may be cut; otherwise each has one owner.
        least_round_bytes: the least size of a round, where parameters may be cut.
    """

    def __init__(self, rank: int, size: int, cuts: bool, least_round_bytes: int) -> None:
        super().__init__(rank, size, cuts)
        self._size = size
        self._least_round_bytes = least_round_bytes
        self.rounds: list[SumRound] = []

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Adds the parameters of a group; earlier parameters keep their owners."""
        first = len(self.by_param)
        parts: list[list[OwnedBytes]] = [[] for _ in params]
        for trained in (True, False):  # separately, so that states and the memory of gradients are divided evenly
            for dtype in dict.fromkeys(param.dtype for param in params):
                chosen = [i for i, p in enumerate(params) if p.requires_grad == trained and p.dtype == dtype]
                for runs in self._divide([params[i].numel() for i in chosen], dtype):
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
        # Not the parameter itself: that has this rank's own gradient, and its version reveals writes by others.
        shard.updated = nn.Parameter(shard.run(param.data), param.requires_grad) if shard.is_mine else None
        return shard


@dataclass(frozen=True)
class SliceReads:
    """The runs of gradients that a rank contributes to one rank's slice: parameters, and offsets and sizes in bytes.

    `padding` bytes of zeros follow, since all slices of a round have the same length.
    """

    params: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    padding: int

    def pieces(self, addresses: Sequence[int], zeros: int) -> list[int]:
        """Returns the address and the number of bytes of each run, given the addresses of the gradients.

        Args:
            addresses: the address of each parameter's gradient, or 0.
            zeros: the address of the zeros that replace missing gradients.
        """
        pieces = [0] * (2 * len(self.params))
        pieces[0::2] = [
            addresses[param] + offset if addresses[param] else zeros
            for param, offset in zip(self.params, self.offsets, strict=True)
        ]
        pieces[1::2] = self.sizes
        if self.padding:
            pieces += (zeros, self.padding)
        return pieces


@dataclass(frozen=True, eq=False)
class ReadyRound:
    """A round, with the memory for its results.

    Attributes:
        dtype_code: the code of the dtype.
        reads: this rank's contribution to each rank's slice.
        sums: this rank's slice of the results.
        averages: the tensors that this rank updates, each with its gradient, a part of `sums`.
    """

    dtype_code: int
    reads: Sequence[SliceReads]
    sums: torch.Tensor
    averages: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @cached_property
    def updated(self) -> frozenset[int]:
        """The ids of the tensors that this rank updates."""
        return frozenset(id(updated) for updated, _ in self.averages)


@dataclass(frozen=True)
class RoundLayout:
    """The rounds of a step, and the sizes in bytes of their longest padding and longest run."""

    rounds: Sequence[ReadyRound]
    longest_padding: int
    longest_run: int


def lay_out(shards: SharedShards, present: Sequence[bool], whole: bool) -> RoundLayout:
    """Returns the rounds for those parameters that have a gradient on some rank.

    Args:
        shards: the slices that each rank owns.
        present: whether each parameter has a gradient.
        whole: whether the results of every round have separate memory; otherwise all rounds share it.
    """
    rounds = [
        SumRound(part.dtype, [[run for run in owned if present[run.param]] for owned in part.runs])
        for part in shards.rounds
    ]
    rounds = [part for part in rounds if any(part.runs)]
    counts = [max(sum(run.numel for run in owned) for owned in part.runs) for part in rounds]
    needed = [
        -(-count * part.dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for part, count in zip(rounds, counts, strict=True)
    ]
    memory = torch.empty(sum(needed) if whole else max(needed, default=0), dtype=torch.uint8, device="cpu")
    ready, offset = [], 0
    for part, count, nbytes in zip(rounds, counts, needed, strict=True):
        sums = memory[offset : offset + count * part.dtype.itemsize].view(part.dtype)
        ready.append(
            ReadyRound(
                DTYPE_CODES[part.dtype],
                [_reads(owned, count, part.dtype.itemsize) for owned in part.runs],
                sums,
                _averages(part.runs[shards.rank], shards, sums),
            )
        )
        offset += nbytes if whole else 0
    reads = [slice_reads for part in ready for slice_reads in part.reads]
    longest_run = max((size for slice_reads in reads for size in slice_reads.sizes), default=0)
    return RoundLayout(ready, max((slice_reads.padding for slice_reads in reads), default=0), longest_run)


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
    averages, first = [], 0
    for run in owned:
        start_bytes = run.start * sums.itemsize
        shard = next(shard for shard in shards.by_param[run.param] if shard.part.start == start_bytes)
        assert shard.updated is not None
        average = sums[first : first + run.numel]
        if shard.is_whole:
            average = average.as_strided(shard.shape, shard.strides, average.storage_offset())
        averages.append((shard.updated, average))
        first += run.numel
    return averages
