"""What a step is computed from: the batches of a rank's shards, and those of other shards if they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Batch(Protocol):
    """What `ShardLoader` yields for a shard."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The epoch, the step and the shard."""

    @property
    def weight(self) -> float:
        """This batch's fraction of the step's samples."""

    @property
    def data(self) -> Any:
        """The data that the loss is computed from."""


@dataclass(frozen=True)
class ShardBatch:
    """A shard's part of a step.

    `key` holds the epoch, the step and the shard; `weight` is this batch's fraction of the step's samples.
    """

    key: tuple[int, int, int]
    weight: float
    data: Any


class StepBatches(list[ShardBatch]):
    """The batches of this rank's shards in one step.

    Args:
        batches: one for each of this rank's shards that has samples.
        read: reads the batch of any shard of the step; None if the shard has no samples in it.
    """

    def __init__(self, batches: Iterable[ShardBatch], read: Callable[[int], ShardBatch | None]) -> None:
        super().__init__(batches)
        self._here: dict[int, ShardBatch] = {batch.key[2]: batch for batch in self}
        self._read = read

    def without_data(self) -> StepBatches:
        """Returns the same step with nothing read yet."""
        return StepBatches([], self._read)

    def of(self, shard: int) -> ShardBatch | None:
        """Returns the batch of a shard, which is read now if it is another rank's; None if it has no samples."""
        return self._here[shard] if shard in self._here else self._read(shard)
