"""The shards of a model that ranks share, and the rounds in which they are updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.parallel.one_copy.slices import Run, cut_evenly, divide_whole
from paceline.parallel.zero.partition import ALIGNMENT_BYTES, Part
from paceline.parallel.zero.shards import Shard, Shards

# The more rounds, the less memory the averages need, and the more of it stays in the cache; but in each round ranks
# wait for each other.
_ROUNDS = 5
_MOST_ROUND_BYTES = 32 << 20


@dataclass(frozen=True)
class SumRound:
    """Gradients of one type that are summed together; `runs[r]` are those of rank r, with the places of parameters."""

    dtype: torch.dtype
    runs: Sequence[Sequence[Run]]


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
        parts: list[list[Part]] = [[] for _ in params]
        for trained in (True, False):  # apart, so that both the states and the memory of gradients are divided evenly
            for dtype in dict.fromkeys(param.dtype for param in params):
                chosen = [at for at, each in enumerate(params) if each.requires_grad == trained and each.dtype == dtype]
                for runs in self._divide([params[at].numel() for at in chosen], dtype):
                    placed = [[run._replace(param=chosen[run.param]) for run in owned] for owned in runs]
                    for owner, owned in enumerate(placed):
                        for run in owned:
                            item = dtype.itemsize
                            parts[run.param].append(Part(run.start * item, run.stop * item, owner))
                    placed = [[run._replace(param=first + run.param) for run in owned] for owned in placed]
                    self.rounds.append(SumRound(dtype, placed))
        for param, its_parts in zip(params, parts, strict=True):
            self.by_param.append([self._shard(param, part) for part in its_parts or [Part(0, 0, 0)]])

    def _divide(self, sizes: Sequence[int], dtype: torch.dtype) -> list[list[list[Run]]]:
        if not self.cuts:
            return divide_whole(sizes, self._size)
        wanted = min(sum(sizes) * dtype.itemsize // _ROUNDS, _MOST_ROUND_BYTES)
        round_size = max(wanted, self._least_round_bytes) // dtype.itemsize
        return cut_evenly(sizes, self._size, round_size, ALIGNMENT_BYTES // dtype.itemsize)

    def _shard(self, param: torch.Tensor, part: Part) -> Shard:
        shard = Shard(param, part, self.rank)
        # Not the parameter itself, which has this rank's own gradient, and whose version shows who else writes to it.
        shard.updated = nn.Parameter(shard.run(param.data), param.requires_grad) if shard.is_mine else None
        return shard
