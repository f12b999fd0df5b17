"""Connections that have proved nothing yet: a limited number, so that those who stay silent cannot keep others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class PendingConnections(Generic[T]):
    """At most `most` connections. One more ends the oldest of those whose origin has the most of them.

    A peer that opens many connections thus ends its own, and one that opens few keeps its place.

    Args:
        most: see above.
        origin: returns whose a connection is. It is asked only once there are too many.
    """

    def __init__(self, most: int, origin: Callable[[T], str]) -> None:
        self._most = most
        self._origin = origin
        self._origins: dict[T, str | None] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._origins)

    def __iter__(self) -> Iterator[T]:
        """Yields the connections, the oldest first."""
        return iter(tuple(self._origins))

    def add(self, connection: T) -> T | None:
        """Adds a connection; returns the one that is to be ended for it, which is no longer pending."""
        self._origins[connection] = None
        if len(self._origins) <= self._most:
            return None
        for each, whose in self._origins.items():
            if whose is None:
                self._origins[each] = self._origin(each)
        counts = Counter(self._origins.values())
        largest = max(counts.values())
        oldest = next(each for each, whose in self._origins.items() if counts[whose] == largest)
        del self._origins[oldest]
        return oldest

    def remove(self, connection: T) -> bool:
        """Removes a connection; returns whether it was pending."""
        if connection not in self._origins:
            return False
        del self._origins[connection]
        return True
