"""Evaluation in logical shards: each sample counts once, and the bits do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.parallel.sharded.batches import ShardBatch, StepBatches
from paceline.parallel.sharded.streams import random_stream
from paceline.parallel.sharded.sums import Values

_EVALUATING = 4  # the purpose of a random stream; `loader`, `logical` and `replica` have the others

Measure = Callable[[Any], torch.Tensor]


class ShardSums:
    """The sum of `measure` over the batches of each shard.

    Args:
        measure: returns a CPU tensor, of the same shape and dtype for each batch, given a batch's data.
        seed: of the random streams.
    """

    def __init__(self, measure: Measure, seed: int) -> None:
        self._measure, self._seed = measure, seed
        self._steps: list[StepBatches] = []
        self._sums: dict[int, torch.Tensor] = {}

    def add_up(self, steps: Iterator[StepBatches]) -> None:
        """Adds up the batches of this rank's shards."""
        for batches in steps:
            for batch in batches:
                self._add(batch)
            self._steps.append(batches.without_data())

    def value_of(self, shard: int) -> Values:
        """Returns the sum of a shard, whose batches are read now if they were another rank's."""
        if shard not in self._sums:
            for batches in self._steps:
                if (batch := batches.of(shard)) is not None:
                    self._add(batch)
        return [self._sums[shard].clone()]

    def _add(self, batch: ShardBatch) -> None:
        with random_stream(self._seed, _EVALUATING, *batch.key):
            value = self._measure(batch.data).detach()
        shard = batch.key[2]
        self._sums[shard] = self._sums[shard] + value if shard in self._sums else value.clone()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Returns a context in which `module` is in evaluation mode and no gradients are computed."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each, mode in modes.items():
            each.training = mode
