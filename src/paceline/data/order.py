"""The order in which an epoch goes through a dataset, and which rank takes which part of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

Remainder = Literal["share", "repeat", "drop"]


class Share(NamedTuple):
    """What one rank takes in one step: `places` in the order of the epoch. After the step all ranks are at `end`."""

    places: tuple[int, ...]
    end: int


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Returns the indices of an epoch, shuffled as torch's DistributedSampler does.

    >>> epoch_order(3, shuffle=False, seed=0, epoch=0)
    [0, 1, 2]
    """
    if not shuffle:
        return list(range(length))
    order: list[int] = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return order


def shares(
    position: int, length: int, batch_size: int, num_replicas: int, rank: int, remainder: Remainder
) -> Iterator[Share]:
    """Yields a rank's shares of the places from `position` to `length`.

    In a step the ranks take `num_replicas * batch_size` consecutive places, rank 0 the first ones. So the position in
    an epoch is one number, whatever the number of ranks. The places at the end that are too few for a step:

    - "share": are divided as evenly as possible; if there are fewer than ranks, the last ranks have no such step.
    - "repeat": are divided too, and ranks without one take a place that another rank has as well.
    - "drop": are left out.

    >>> [share.places for share in shares(4, 11, 2, num_replicas=2, rank=1, remainder="share")]
    [(6, 7), (10,)]
    """
    step = num_replicas * batch_size
    while length - position >= step:
        first = position + rank * batch_size
        position += step
        yield Share(tuple(range(first, first + batch_size)), position)
    rest = length - position
    if rest == 0 or remainder == "drop":
        return
    each, more = divmod(rest, num_replicas)
    first = position + rank * each + min(rank, more)
    places = tuple(range(first, first + each + (rank < more)))
    if not places and remainder == "repeat":
        places = (position + rank % rest,)
    if places:
        yield Share(places, length)
