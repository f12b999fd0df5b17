"""The values that the program logs, such as its loss: over the ranks, and over all steps with few points."""

from __future__ import annotations

from statistics import fmean

from paceline.observe.live.picture import Growing, Point
from paceline.observe.live.sample import RankSample
from paceline.observe.live.tail import Thinned

_NAMES_KEPT = 16
_STEPS_OPEN = 4  # a rank may log its value so many steps after the others


class Curves:
    """Takes what each rank has logged, and returns one curve a name."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], list[float]] = {}
        self._loggers: dict[str, int] = {}  # how many ranks log this name, once that is known
        self._thinned: dict[str, Thinned] = {}
        self._points: list[Point] = []
        self._epoch = 0
        self._growing: Growing[Point] = Growing()

    def take(self, ranks: tuple[RankSample, ...]) -> None:
        """Takes the values of a sample."""
        for each in ranks:
            for step, name, value in each.values:
                if name in self._thinned or len(self._thinned) < _NAMES_KEPT:
                    self._thinned.setdefault(name, Thinned())
                    self._open.setdefault((step, name), []).append(value)
        complete = [key for key in sorted(self._open) if self._is_complete(*key)]
        for step, name in complete:
            values = self._open.pop((step, name))
            self._loggers[name] = max(len(values), self._loggers.get(name, 0))
            self._add(Point(name, step, _short(fmean(values)), _short(min(values)), _short(max(values))))
        if complete:
            self._growing = Growing(tuple(self._points), 0, self._epoch)

    def _is_complete(self, step: int, name: str) -> bool:
        """Returns whether no more values of this step are to come: all that log the name have, or have gone on."""
        if len(self._open[step, name]) >= self._loggers.get(name, 1 << 30):
            return True
        later = sum(1 for other, its_name in self._open if its_name == name and other > step)
        return later >= _STEPS_OPEN

    def growing(self) -> Growing[Point]:
        """Returns the points of all curves, in the order in which they came."""
        return self._growing

    def _add(self, point: Point) -> None:
        curve = self._thinned[point.name]
        epoch = curve.epoch
        if curve.points and point.step <= curve.points[-1].step:  # after a restart, from an earlier step
            curve = self._thinned[point.name] = curve.until(point.step)
        done = curve.add(point)
        if curve.epoch == epoch:
            self._points += done
        else:  # all points of this curve are new
            self._points = [each for other in self._thinned.values() for each in other.points]
            self._epoch += 1


def _short(value: float) -> float:
    """Returns the value with as many digits as a chart can show."""
    return float(f"{value:.6g}")
