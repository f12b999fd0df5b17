"""Which listener of a machine holds which number: without a socket or a clock."""

from __future__ import annotations

import errno
from collections.abc import Hashable
from typing import Generic, TypeVar

FIRST, LAST = 1024, 28_999  # given to those that want any; numbers that are chosen are mostly larger

Holder = TypeVar("Holder", bound=Hashable)


class Numbers(Generic[Holder]):
    """The numbers that are held.

    Those that are given are counted up, so that a number returns as late as possible: who still wants its last holder
    finds nobody rather than another one.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Holder] = {}
        self._next = FIRST

    def take(self, wanted: int, holder: Holder) -> int:
        """Gives a listener the number that it wants, or a free one if that is 0; returns the number.

        Raises:
            OSError: another listener holds the number, or all are held.
        """
        if wanted == 0:
            wanted = self._free()
        elif wanted in self._holders:
            raise OSError(errno.EADDRINUSE, f"another listener of this machine has the number {wanted}")
        self._holders[wanted] = holder
        return wanted

    def holder(self, number: int) -> Holder | None:
        """Returns who holds a number; None if nobody does."""
        return self._holders.get(number)

    def release(self, holder: Holder) -> None:
        """Takes back all numbers of a listener; idempotent."""
        self._holders = {number: each for number, each in self._holders.items() if each != holder}

    def _free(self) -> int:
        for _ in range(FIRST, LAST + 1):
            number = self._next
            self._next = FIRST if number == LAST else number + 1
            if number not in self._holders:
                return number
        raise OSError(errno.EADDRNOTAVAIL, f"all numbers from {FIRST} to {LAST} are held")
