"""Divides the parameters into buckets, whose gradients are reduced together.

Counts gradients as backward computes them, until a bucket is full.
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


def make_buckets(sizes: Sequence[int], dtypes: Sequence[Hashable], caps_bytes: Sequence[int]) -> list[Bucket]:
    """Divides the parameters, beginning with the last one, into buckets of limited size.

    This is about the order in which backward computes their gradients. A parameter that is larger than the cap has a
    bucket of its own. A bucket has one dtype, but a model that alternates between two dtypes still gets full buckets of
    each. The buckets are in the order in which their last gradient is computed.

    Args:
        sizes: the bytes of each parameter, in the order of registration.
        dtypes: the parameters' dtypes, or other values that must be equal in a bucket.
        caps_bytes: for each dtype, the largest number of bytes of its first bucket, its second, and so on; the last
            number is for all others.

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

    for index in reversed(range(len(sizes))):
        dtype, nbytes = dtypes[index], sizes[index]
        cap = caps_bytes[min(closed.get(dtype, 0), len(caps_bytes) - 1)]
        if dtype in filling and filled_bytes[dtype] + nbytes > cap:
            close(dtype)
        filling.setdefault(dtype, []).append(index)
        filled_bytes[dtype] = filled_bytes.get(dtype, 0) + nbytes
    for dtype in list(filling):
        close(dtype)
    buckets.sort(key=lambda bucket: -bucket.params[-1])
    return buckets


def bucket_params(
    params: Sequence[nn.Parameter], caps_bytes: Sequence[int], left_out: Collection[int] = ()
) -> list[Bucket]:
    """Returns the buckets of `params`, except for the indices in `left_out`; a bucket has one dtype and one device."""
    kept = [at for at in range(len(params)) if at not in left_out]
    kinds = [(params[at].dtype, params[at].device) for at in kept]
    buckets = make_buckets([params[at].nbytes for at in kept], kinds, caps_bytes)
    return [Bucket(tuple(kept[at] for at in bucket.params), bucket.nbytes) for bucket in buckets]


class Countdown:
    """Counts the gradients that the first `early` buckets still wait for, and decides which bucket starts next.

    Buckets start strictly in their order, in whatever order they become full: every rank must make the same calls in
    the same order, and autograd's order may differ between ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], params: int, early: int) -> None:
        # - The same for every backward
        self._buckets = buckets
        self._early = early
        self._expected = [1] * params  # the number of gradients that each parameter gets
        self._full = [len(bucket.params) for bucket in buckets]  # the number of parameters that each bucket waits for
        # - The state of this backward
        self.next = 0  # the first bucket that has not been started
        self.reset()

    def reset(self) -> None:
        """Resets the counts before a backward."""
        self.next = 0
        self._counts = [0] * len(self._expected)
        self._left = list(self._full)

    def count(self, index: int, bucket: int) -> int:
        """Counts a gradient of the parameter `index`.

        Returns:
            How many parameters its bucket still waits for, or -1 if the bucket was started without this gradient.
        """
        self._counts[index] += 1
        if self._counts[index] == self._expected[index]:
            self._left[bucket] -= 1
        elif bucket < self.next:
            return -1
        return self._left[bucket]

    def may_start(self) -> bool:
        """Returns whether the next bucket is full and may start before backward ends."""
        return self.next < self._early and self._left[self.next] == 0

    def learn(self, anywhere: Sequence[bool]) -> None:
        """Expects from now on as many gradients of each parameter as were counted in this backward.

        Args:
            anywhere: for each parameter, whether any rank has a gradient for it.
        """
        self._expected = list(self._counts)
        for at, bucket in enumerate(self._buckets):
            self._full[at] = sum(self._counts[index] > 0 for index in bucket.params if anywhere[index])

    def count_each_once(self) -> None:
        """Counts one gradient of every parameter, on a rank that takes part in the others' backward with zeros."""
        self._counts = [1] * len(self._expected)
