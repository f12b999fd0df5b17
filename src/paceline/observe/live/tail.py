"""Lists that keep what is worth showing: the end of a long one, or all of it with fewer points."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from paceline.observe.live.picture import Growing, Point

Item = TypeVar("Item")


class Tail(Generic[Item]):
    """The last `most` items of a list."""

    def __init__(self, most: int) -> None:
        self._items: deque[Item] = deque(maxlen=most)
        self._count = 0
        self._growing: Growing[Item] | None = None

    def extend(self, items: Iterable[Item]) -> None:
        """Appends items."""
        before = self._count
        for item in items:
            self._items.append(item)
            self._count += 1
        if self._count != before:
            self._growing = None

    def growing(self) -> Growing[Item]:
        """Returns the items; the same object until more are appended."""
        if self._growing is None:
            self._growing = Growing(tuple(self._items), self._count - len(self._items))
        return self._growing


class Thinned:
    """The values of one name over all steps, as few points as fit.

    When there are too many, every two neighbours become one, which keeps the smallest and the largest value, so that
    a spike stays visible after a million steps.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._stride = 1  # so many values become a point
        self._open: list[Point] = []
        self.points: list[Point] = []
        self.epoch = 0

    def until(self, step: int) -> Thinned:
        """Returns a curve without the points from that step on."""
        rest = Thinned(self._most)
        rest.points = [each for each in self.points if each.step < step]
        rest._stride = self._stride
        rest.epoch = self.epoch + 1
        return rest

    def add(self, point: Point) -> list[Point]:
        """Takes the next value; returns the points that this completes, unless `epoch` changed, and all are new."""
        self._open.append(point)
        if len(self._open) < self._stride:
            return []
        done = _joined(self._open)
        self._open = []
        self.points.append(done)
        if len(self.points) >= self._most:
            self.points = [_joined(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self._stride *= 2
            self.epoch += 1
        return [done]


def _joined(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    mean = sum(each.mean for each in points) / len(points)
    return Point(
        points[-1].name, points[-1].step, mean, min(each.low for each in points), max(each.high for each in points)
    )
