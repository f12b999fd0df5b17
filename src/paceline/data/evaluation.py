"""Evaluation on several ranks with the result that one process would get."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from paceline.data.sampler import which_part
from paceline.group.collectives import all_gather, all_reduce
from paceline.group.default import Group, resolve


class DistributedEvalSampler(Sampler[int]):
    """The indices of one rank's part of `dataset`, in order, with nothing repeated and nothing left out.

    Every sample is on exactly one rank. The lengths differ by at most one between ranks, so evaluate without
    collectives (`DistributedDataParallel` makes none in `eval` or `no_grad`), and combine the results with `gather` or
    `mean_over_samples`.

    Args:
        dataset: anything with a length.
        num_replicas, rank: the number of parts and which to take; the default group's world size and rank if None.

    Raises:
        ValueError: `rank` is not from 0 to `num_replicas` - 1, or one is None and there is no default group.

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
        """Returns the number of samples of this rank."""
        return len(range(self.rank, len(self.dataset), self.num_replicas))

    def gather(self, values: torch.Tensor, group: Group = None) -> torch.Tensor:
        """Gathers a value for each sample of the dataset, in the order of the dataset, on every rank.

        A mean or a ranking computed from it has the same bits for every number of ranks.

        Args:
            values: a tensor of shape (len(self), ...) with this rank's values, in the order of iteration; the other
                dimensions and the dtype are the same on every rank.
            group: a group of `num_replicas` ranks.

        Raises:
            ValueError: `values` does not have one value for each sample of this rank.
        """
        if values.shape[:1] != (len(self),):
            raise ValueError(
                f"rank {self.rank}: gather got values of shape {tuple(values.shape)}; the first dimension must be "
                f"{len(self)}, one entry for each sample that this sampler gives"
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
    """Returns the mean over the samples of all ranks, each of which counts once.

    The mean of the ranks' means is wrong where ranks have different numbers of samples; this divides the sum of all
    totals by the sum of all counts, in float64.

    Args:
        total: a number or a tensor, summed over this rank's samples; it has the same shape on every rank.
        count: the number of those samples; it may be 0.
        group: the ranks; None for the default group.

    Returns:
        A float64 tensor of the shape of `total`, the same on every rank.

    Raises:
        ZeroDivisionError: no rank had a sample.

    Example::

        accuracy = paceline.mean_over_samples((predicted == labels).sum(), len(labels))
    """
    sums = torch.as_tensor(total).detach().to("cpu", torch.float64).reshape(-1)
    message = torch.cat([sums, torch.tensor([count], dtype=torch.float64)])
    all_reduce(message, group=group)
    if message[-1] == 0:
        raise ZeroDivisionError("mean_over_samples: count is 0 on every rank; a mean needs at least one sample")
    return (message[:-1] / message[-1]).reshape(torch.as_tensor(total).shape)
