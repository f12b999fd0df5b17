"""Assignment of parameters to buckets, that is, to groups whose gradients are reduced together.

This module does not import torch, because most of `paceline plan` runs without it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


MIB = 1 << 20
FIRST_BUCKET_BYTES = 1 * MIB


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype whose gradients are reduced in one call: their indices and total size in bytes."""

    params: tuple[int, ...]
    nbytes: int


def caps_of(cap_bytes: int) -> tuple[int, int]:
    """Returns the maximum sizes of the first bucket and of all later buckets; a small first bucket is reduced early."""
    return min(FIRST_BUCKET_BYTES, cap_bytes), cap_bytes


def make_buckets(
    sizes: Sequence[int],
    dtypes: Sequence[Hashable],
    caps_bytes: Sequence[int],
    *,
    order: Sequence[int] | None = None,
    may_exceed: bool = False,
) -> list[Bucket]:
    """Divides the parameters into buckets of limited size.

    By default, buckets are filled in reverse order of registration, which is roughly the order in which backward
    computes the gradients. A parameter larger than the maximum size gets its own bucket. Each bucket has one dtype; a
    model that alternates between two dtypes still gets full buckets for both. The buckets are returned in the order in
    which backward completes them.

    Args:
        sizes: the size of each parameter in bytes, in the order of registration.
        dtypes: the parameters' dtypes, or other values that must be equal within a bucket.
        caps_bytes: the maximum sizes in bytes of each dtype's first bucket, second bucket and so on; the last entry
            applies to all remaining buckets.
        order: all parameter indices, in the order in which a backward pass computed the gradients.
        may_exceed: whether the last parameter added to a bucket may exceed the bucket's maximum size, as in torch. If
            False, such a parameter starts a new bucket.

    >>> make_buckets([4, 4, 4], ["float32"] * 3, caps_bytes=[4, 8])
    [Bucket(params=(2,), nbytes=4), Bucket(params=(1, 0), nbytes=8)]
    """
    buckets: list[Bucket] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    closed: dict[Hashable, int] = {}

    def close(dtype: Hashable) -> None:
        buckets.append(Bucket(tuple(filling.pop(dtype)), filled_bytes.pop(dtype)))
        closed[dtype] = closed.get(dtype, 0) + 1

    computed = list(reversed(range(len(sizes)))) if order is None else order
    for index in computed:
        dtype, nbytes = dtypes[index], sizes[index]
        cap = caps_bytes[min(closed.get(dtype, 0), len(caps_bytes) - 1)]
        if dtype in filling and filled_bytes[dtype] + nbytes > cap and not may_exceed:
            close(dtype)
        filling.setdefault(dtype, []).append(index)
        filled_bytes[dtype] = filled_bytes.get(dtype, 0) + nbytes
        if may_exceed and filled_bytes[dtype] >= cap:
            close(dtype)
    for dtype in list(filling):
        close(dtype)
    position = {index: at for at, index in enumerate(computed)}
    buckets.sort(key=lambda bucket: position[bucket.params[-1]])
    return buckets


def bucket_params(
    params: Sequence[nn.Parameter],
    caps_bytes: Sequence[int],
    left_out: Collection[int],
    *,
    order: Sequence[int] | None = None,
    may_exceed: bool,
) -> list[Bucket]:
    """Divides `params`, except the indices in `left_out`, into buckets; each bucket has one dtype and one device.

    See `make_buckets` for `caps_bytes`, `order` and `may_exceed`.
    """
    kept = [index for index in range(len(params)) if index not in left_out]
    position = {index: at for at, index in enumerate(kept)}
    buckets = make_buckets(
        [params[index].nbytes for index in kept],
        [(params[index].dtype, params[index].device) for index in kept],
        caps_bytes,
        order=None if order is None else [position[index] for index in order if index in position],
        may_exceed=may_exceed,
    )
    return [Bucket(tuple(kept[position] for position in bucket.params), bucket.nbytes) for bucket in buckets]
