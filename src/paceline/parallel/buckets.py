"""Which gradients are reduced together, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIB = 1 << 20
FIRST_BUCKET_BYTES = 1 * MIB


@dataclass(frozen=True)
class Bucket:
    """Parameters, by index, whose gradients are reduced in one call; all of one type."""

    params: tuple[int, ...]
    nbytes: int


def make_buckets(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype], cap_bytes: int, first_cap_bytes: int = FIRST_BUCKET_BYTES
) -> list[Bucket]:
    """Cuts the parameters, last registered first, into buckets of at most `cap_bytes`.

    That is about the order in which backward computes their gradients. The first bucket is small, so that reduction
    starts early. A parameter larger than the cap has a bucket of its own; a change of type starts a new bucket.

    Args:
        sizes: bytes of each parameter, in order of registration.
        dtypes: their types.

    >>> make_buckets([4, 4, 4], [torch.float32] * 3, cap_bytes=8, first_cap_bytes=4)
    [Bucket(params=(2,), nbytes=4), Bucket(params=(1, 0), nbytes=8)]
    """
    buckets: list[Bucket] = []
    open_params: list[int] = []
    open_bytes = 0

    def close() -> None:
        nonlocal open_bytes
        if open_params:
            buckets.append(Bucket(tuple(open_params), open_bytes))
        open_params.clear()
        open_bytes = 0

    for index in reversed(range(len(sizes))):
        cap = cap_bytes if buckets else min(first_cap_bytes, cap_bytes)
        if open_params and (open_bytes + sizes[index] > cap or dtypes[open_params[-1]] != dtypes[index]):
            close()
        open_params.append(index)
        open_bytes += sizes[index]
    close()
    return buckets
