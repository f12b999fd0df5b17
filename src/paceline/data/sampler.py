"""Gives every rank its part of a dataset."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from paceline.data.order import epoch_order
from paceline.group.queries import get_rank, get_world_size


class DistributedSampler(Sampler[int]):
    """The indices of one rank's part of `dataset`; the same sequence as torch's DistributedSampler.

    All ranks get the same number of samples: without `drop_last` the first ones are repeated to fill up, with it the
    last ones are left out. Call `set_epoch` before each epoch, or every epoch has the same order. A program that never
    calls it is warned, once, when it has read more than half of the samples for the second time; to look at a batch or
    two does not count.

    Args:
        dataset: anything with a length.
        num_replicas, rank: the number of parts and which to take; the default group's world size and rank if None.
        shuffle: permute the indices, by `seed` plus the epoch.
        seed: the same on every rank.
        drop_last: leave out the samples that cannot be shared evenly.

    Raises:
        ValueError: `rank` is not from 0 to `num_replicas` - 1, or one is None and there is no default group.

    >>> list(DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False))
    [1, 3, 0]
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas, rank = which_part(num_replicas, rank)
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._passes = 0  # iterations that went through more than half of the samples
        self._warned = False  # or no warning is needed, since the program calls set_epoch
        length = len(dataset)
        if drop_last and length % num_replicas:
            self.num_samples = math.ceil((length - num_replicas) / num_replicas)
        else:
            self.num_samples = math.ceil(length / num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's indices in this epoch."""
        length = len(self.dataset)
        indices = epoch_order(length, self.shuffle, self.seed, self.epoch)
        if self.drop_last:
            indices = indices[: self.total_size]
        elif indices:
            repeats = math.ceil(self.total_size / length)
            indices = (indices * repeats)[: self.total_size]
        return self._read(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        """Returns the number of samples of each rank."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.epoch = epoch
        self._warned = True

    def _read(self, indices: list[int]) -> Iterator[int]:
        middle = len(indices) // 2
        yield from indices[:middle]
        if indices:
            self._count_a_pass()
        yield from indices[middle:]

    def _count_a_pass(self) -> None:
        self._passes += 1
        if self.shuffle and not self._warned and self._passes > 1:
            self._warned = True
            warnings.warn(
                f"rank {self.rank}: DistributedSampler goes through its samples again, in the order of epoch "
                f"{self.epoch} as before. Call sampler.set_epoch(epoch) before each epoch to shuffle them differently; "
                "where the same order is meant, as for evaluation, make it with shuffle=False",
                stacklevel=3,
            )


def which_part(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns the number of parts and which one to take, by default the default group's size and rank.

    Raises:
        ValueError: `rank` is not from 0 to `num_replicas` - 1.
    """
    num_replicas = get_world_size() if num_replicas is None else num_replicas
    rank = get_rank() if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank is {rank}; with num_replicas {num_replicas} it must be from 0 to {num_replicas - 1}")
    return num_replicas, rank
