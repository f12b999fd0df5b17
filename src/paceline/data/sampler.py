"""Gives every rank its part of a dataset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from paceline.group.default import get_rank, get_world_size


class DistributedSampler(Sampler[int]):
    """The indices of one rank's part of `dataset`; the same sequence as torch's DistributedSampler.

    All ranks get the same number of samples: without `drop_last` the first ones are repeated to fill up, with it the
    last ones are left out. Call `set_epoch` before each epoch, or every epoch has the same order.

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
        num_replicas = get_world_size() if num_replicas is None else num_replicas
        rank = get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank is {rank}; with num_replicas {num_replicas} it must be from 0 to {num_replicas - 1}"
            )
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        length = len(dataset)
        if drop_last and length % num_replicas:
            self.num_samples = math.ceil((length - num_replicas) / num_replicas)
        else:
            self.num_samples = math.ceil(length / num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        """This rank's indices in this epoch."""
        length = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices: list[int] = torch.randperm(length, generator=generator).tolist()
        else:
            indices = list(range(length))
        if self.drop_last:
            indices = indices[: self.total_size]
        elif indices:
            repeats = math.ceil(self.total_size / length)
            indices = (indices * repeats)[: self.total_size]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        """The number of samples of each rank."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.epoch = epoch
