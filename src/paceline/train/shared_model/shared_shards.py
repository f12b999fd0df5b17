"""SharedShards: the shards of a shared model, and the rounds in which shards are averaged and updated.

Parameters of one dtype are concatenated and divided into rounds, and each round is divided into one slice per rank. In
a round, every rank reads the gradients for its slice from the other ranks and updates the slice immediately, while the
data is in the cache. `RoundLayout` holds the memory for a step's averages.
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

from paceline.comm.engine.channel import DTYPE_CODES
from paceline.train.zero.shards import ALIGNMENT_BYTES, OwnedBytes, Shard, Shards, assign_to_ranks

# With more rounds, the averages need less memory and are more likely to fit in the cache, but the ranks wait for each
# other more often.
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


Round = list[list[ElementRun]]  # one list of runs per rank


def cut_evenly(sizes: Sequence[int], ranks: int, round_size: int, alignment: int) -> list[Round]:
    """Divides parameters into rounds of about `round_size` elements, and each round into slices of about equal size.

    A parameter is cut only at multiples of `alignment` elements. Two ranks therefore never write to the same cache
    line, and kernels compute each element as they would in the whole parameter. `sizes` are in elements.

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
    """Returns the permitted cut nearest to `wanted`, an index into the concatenated parameters."""
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
    """Gradients of one dtype that are summed together; `runs[r]` lists the runs that rank r owns."""

    dtype: torch.dtype
    runs: Sequence[Sequence[ElementRun]]


class SharedShards(Shards):
    """The shards of an optimizer's parameters; the division into shards is the same on every host.

    `rank` is the index of this rank on its host, which has `size` ranks. Without `cuts`, each parameter has one owner.
    With cuts, a round has at least `least_round_bytes`.
    """

    def __init__(self, rank: int, size: int, cuts: bool, least_round_bytes: int) -> None:
        super().__init__(rank, size, cuts)
        self._size = size
        self._least_round_bytes = least_round_bytes
        self.rounds: list[SumRound] = []

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Adds a group's parameters; parameters that were added earlier keep their owners."""
        first = len(self.by_param)
        parts: list[list[OwnedBytes]] = [[] for _ in params]
        for trained in (True, False):  # separate division keeps states and gradients balanced
            for dtype in dict.fromkeys(param.dtype for param in params):
                chosen = [i for i, p in enumerate(params) if p.requires_grad == trained and p.dtype == dtype]
                item = dtype.itemsize
                for runs in self._divide([params[i].numel() for i in chosen], dtype):
                    for owner, owned in enumerate(runs):
                        for run in owned:
                            parts[chosen[run.param]].append(OwnedBytes(run.start * item, run.stop * item, owner))
                    placed = [[run._replace(param=first + chosen[run.param]) for run in owned] for owned in runs]
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
        # A separate tensor is needed because the parameter holds this rank's own gradient, and because the parameter's
        # version reveals unexpected writes.
        shard.updated = nn.Parameter(shard.run(param.data), param.requires_grad) if shard.is_mine else None
        return shard


@dataclass(frozen=True)
class SliceReads:
    """The gradient runs that a rank contributes to one slice: parameter indices, and offsets and sizes in bytes.

    The runs are followed by `padding` zero bytes, because all slices in a round have the same length.
    """

    params: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    padding: int

    def pieces(self, addresses: Sequence[int], zeros: int) -> list[int]:
        """Returns a flat sequence that contains the address and the size in bytes of each run.

        Parameters with an address of 0 have no gradient; the bytes at the address `zeros` replace it.
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
    """A round together with the memory for its results."""

    dtype_code: int  # the core's code for the dtype
    reads: Sequence[SliceReads]  # this rank's contribution to each rank's slice
    sums: torch.Tensor  # this rank's slice of the results
    averages: Sequence[tuple[torch.Tensor, torch.Tensor]]  # tensors to update, and their gradients: views of `sums`

    @cached_property
    def updated(self) -> frozenset[int]:
        """The ids of the tensors that this rank updates."""
        return frozenset(id(updated) for updated, _ in self.averages)


@dataclass(frozen=True)
class RoundLayout:
    """The rounds of a step, and the sizes in bytes of the longest padding and the longest run."""

    rounds: Sequence[ReadyRound]
    longest_padding: int
    longest_run: int


def lay_out(shards: SharedShards, present: Sequence[bool], whole: bool) -> RoundLayout:
    """Allocates the rounds for the parameters that have a gradient on any rank: those whose flag in `present` is True.

    If `whole`, the results of each round have separate memory. Otherwise, all rounds share the same memory.
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
