"""DistributedSampler and DistributedEvalSampler: select a rank's samples; mean_over_samples: averages over ranks."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from paceline.comm.group.collectives.collectives import all_gather, all_reduce
from paceline.comm.group.default import Group, get_rank, get_world_size, resolve
from paceline.train.data.epoch_order import epoch_order


class DistributedSampler(Sampler[int]):
    """Yields the indices of one rank's part of `dataset`, in the same order as torch's DistributedSampler.

    All ranks get the same number of samples: the first samples are repeated or, with `drop_last`, the last samples are
    skipped. Call `set_epoch` before each epoch; without it, every epoch has the same order. A program that never calls
    `set_epoch` gets one warning once it has read more than half of the samples a second time.

    Args:
        dataset: an object with a length.
        num_replicas, rank: the number of parts and the index of the part to read; if None, the default group's size and
            rank.
        shuffle: whether to permute the indices, seeded with `seed` plus the epoch.
        seed: the seed for the permutation, which must be the same on every rank.
        drop_last: whether to skip samples that cannot be divided evenly.

    Raises:
        ValueError: `rank` is not between 0 and `num_replicas` - 1, or either argument is None and there is no default
            group.

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
        self._passes = 0  # the number of iterations that read half of the samples or more
        self._warned = False  # also set by `set_epoch`, because a program that calls it needs no warning
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"DistributedSampler: dataset is a {type(dataset).__name__} without a length; it must be a map-style "
                "dataset, which has __len__"
            )
        length = len(dataset)
        if drop_last and length % num_replicas:
            self.num_samples = math.ceil((length - num_replicas) / num_replicas)
        else:
            self.num_samples = math.ceil(length / num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's indices in the current epoch."""
        length = len(self.dataset)
        indices = epoch_order(length, self.shuffle, self.seed, self.epoch)
        if self.drop_last:
            indices = indices[: self.total_size]
        elif indices:
            repeats = math.ceil(self.total_size / length)
            indices = (indices * repeats)[: self.total_size]
        return self._read(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        """Returns the number of samples per rank."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order of the next iteration.

        Raises:
            TypeError: `epoch` is not an integer.
        """
        self.epoch = operator.index(epoch)
        self._warned = True

    def _read(self, indices: list[int]) -> Iterator[int]:
        middle = len(indices) // 2
        yield from indices[:middle]
        if indices:
            self._passes += 1
        if indices and self.shuffle and not self._warned and self._passes > 1:
            self._warned = True
            warnings.warn(
                f"rank {self.rank}: DistributedSampler goes through its samples again, in the order of epoch "
                f"{self.epoch} as before. Call sampler.set_epoch(epoch) before each epoch to shuffle them differently; "
                "if the same order is intended, as for evaluation, create it with shuffle=False",
                stacklevel=2,
            )
        yield from indices[middle:]


def which_part(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns `num_replicas` and `rank`, checked; replaces None with the default group's size or rank."""
    num_replicas = get_world_size() if num_replicas is None else num_replicas
    rank = get_rank() if rank is None else rank
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}; it must be at least 1")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank is {rank}; with num_replicas {num_replicas} it must be from 0 to {num_replicas - 1}")
    return num_replicas, rank


class DistributedEvalSampler(Sampler[int]):
    """Yields the indices of one rank's part of `dataset`, in order, without repeating or skipping samples.

    Every sample belongs to exactly one rank. The number of samples may differ by one between ranks, so evaluate without
    collectives (`DistributedDataParallel` does not call any in `eval` mode under `no_grad`), and combine the results
    with `gather` or `mean_over_samples`.

    Args:
        dataset: an object with a length.
        num_replicas, rank: the number of parts and the index of the part to read; if None, the default group's size and
            rank.

    Raises:
        ValueError: `rank` is not between 0 and `num_replicas` - 1, or either argument is None and there is no default
            group.

    >>> list(DistributedEvalSampler(range(5), num_replicas=2, rank=1))
    [1, 3]
    """

    def __init__(self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None) -> None:
        self.num_replicas, self.rank = which_part(num_replicas, rank)
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's indices."""
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self) -> int:
        """Returns the number of samples for this rank."""
        return len(range(self.rank, len(self.dataset), self.num_replicas))

    def gather(self, values: torch.Tensor, group: Group = None) -> torch.Tensor:
        """Gathers one value per sample, in the order of the dataset, on every rank.

        The result, and any metric computed from it, does not depend on the number of ranks.

        Args:
            values: a tensor of shape (len(self), ...) with this rank's values, in the order of iteration; the trailing
                dimensions and the dtype must be the same on every rank.
            group: a group with `num_replicas` ranks; if None, the default group.

        Raises:
            ValueError: `values` does not have one value per sample on this rank, or `group` has a different size.
        """
        if values.shape[:1] != (len(self),):
            raise ValueError(
                f"rank {self.rank}: gather got values of shape {tuple(values.shape)}; the first dimension must be "
                f"{len(self)}, one entry for each sample of this sampler"
            )
        chosen = resolve(group)
        if chosen is None or chosen.size() != self.num_replicas:
            seen = "a group that this rank is not in" if chosen is None else f"a group of {chosen.size()} ranks"
            raise ValueError(f"rank {self.rank}: gather got {seen}; it needs one of {self.num_replicas} ranks")
        longest = -(-len(self.dataset) // self.num_replicas)
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(self)] = values.detach()
        parts = [torch.empty_like(padded) for _ in range(self.num_replicas)]
        all_gather(parts, padded, group)
        return torch.stack(parts, 1).flatten(0, 1)[: len(self.dataset)]


def mean_over_samples(total: torch.Tensor | float, count: int, group: Group = None) -> torch.Tensor:
    """Returns the mean over all ranks' samples, with equal weight for each sample.

    An average of the ranks' means would be wrong if ranks have different numbers of samples. This function divides the
    sum of all totals by the sum of all counts, in float64.

    Args:
        total: the sum over this rank's samples, as a number or a tensor; the shape must be the same on every rank.
        count: the number of samples on this rank; may be 0.
        group: the process group of the ranks; if None, the default group.

    Returns:
        A float64 tensor with the shape of `total`. The result is the same on every rank.

    Raises:
        ZeroDivisionError: no rank had a sample.

    Example::

        accuracy = paceline.mean_over_samples((predicted == labels).sum(), len(labels))
    """
    own = total if isinstance(total, torch.Tensor) else torch.as_tensor(total, device="cpu")
    sums = own.detach().to("cpu", torch.float64).reshape(-1)
    message = torch.cat([sums, torch.tensor([count], dtype=torch.float64, device="cpu")])
    all_reduce(message, group=group)
    if message[-1] == 0:
        raise ZeroDivisionError("mean_over_samples: count is 0 on every rank; a mean needs at least one sample")
    return (message[:-1] / message[-1]).reshape(own.shape)
