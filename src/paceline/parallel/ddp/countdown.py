"""Counts gradients as backward computes them, until a bucket is full."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parallel.ddp.buckets import Bucket


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
