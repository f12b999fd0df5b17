"""Buckets: the division of a model's parameters into groups whose gradients are reduced together.

This module does not import torch, because `paceline plan` uses it too.
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
    """Parameters of one dtype, by index, whose gradients are reduced in one call."""

    params: tuple[int, ...]
    nbytes: int


def caps_of(cap_bytes: int) -> tuple[int, int]:
    """Returns the caps of the first bucket, which is small so that reduction starts early, and of all others."""
    return min(FIRST_BUCKET_BYTES, cap_bytes), cap_bytes


def make_buckets(
    sizes: Sequence[int],
    dtypes: Sequence[Hashable],
    caps_bytes: Sequence[int],
    *,
    order: Sequence[int] | None = None,
    may_exceed: bool = False,
) -> list[Bucket]:
    """Divides the parameters, by default beginning with the last one, into buckets of limited size.

    This is roughly the order in which backward computes their gradients. A parameter larger than the cap has a bucket
    of its own. A bucket has one dtype, but a model that alternates between two dtypes still gets full buckets of each.
    The buckets are in the order in which their last gradient is computed.

    Args:
        sizes: the size of each parameter in bytes, in the order of registration.
        dtypes: the parameters' dtypes, or other values that must be equal in a bucket.
        caps_bytes: the largest size in bytes of each dtype's first bucket, second bucket and so on; the last one
            applies to all further buckets.
        order: all indices, in the order in which a backward computed the gradients.
        may_exceed: whether the parameter that makes a bucket reach its cap still belongs to it, as in torch, even if
            the bucket then exceeds the cap.

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
    left_out: Collection[int] = (),
    *,
    order: Sequence[int] | None = None,
    may_exceed: bool = False,
) -> list[Bucket]:
    """Returns the buckets of `params`, except for the indices in `left_out`; a bucket has one dtype and one device.

    The arguments `order` and `may_exceed` are those of `make_buckets`.
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
