"""State of a job that the page, `paceline top` and the report draw: one immutable `DashboardState`.

Durations are in milliseconds, as they are shown, except those with the suffix `_s`, which are in seconds. Lists that
only grow are `Growing`: a viewer that has the beginning of a list fetches only the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.operate.dashboard.job_sample import JobEvent, Line, Stack, StallNotice


def about(seconds: float) -> str:
    """Returns a duration as text in one or two units.

    >>> about(0.4), about(14), about(14 * 60), about(3 * 3600 + 5 * 60), about(50 * 3600)
    ('less than 1 s', '14 s', '14 min', '3 h 5 min', '2 d 2 h')
    """
    if seconds < 1:
        return "less than 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def milliseconds(value: float) -> str:
    """Returns milliseconds as text with three significant digits.

    >>> milliseconds(174.2), milliseconds(17.42), milliseconds(1.742), milliseconds(2500.0)
    ('174 ms', '17.4 ms', '1.74 ms', '2.5 s')
    """
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} ms"


Item = TypeVar("Item")

PARTS = ("data", "forward", "backward", "exposed", "optimizer", "other")
"""The parts of a step, in the order in which they are stacked; `exposed` is the wait for communication."""


@dataclass(frozen=True)
class Growing(Generic[Item]):
    """Latest items of a list that grows at its end.

    Attributes:
        items: the items that are kept.
        first: the number of the first of them; earlier ones were dropped.
        epoch: a number that changes when earlier items have changed, so that a viewer needs all of them again.
    """

    items: tuple[Item, ...] = ()
    first: int = 0
    epoch: int = 0

    @property
    def end(self) -> int:
        """The number of the next item."""
        return self.first + len(self.items)


@dataclass(frozen=True)
class JobHeader:
    """State of the job in one sentence, and its figures.

    `mood` is "good", "waiting", "bad" or "over" and selects the colour. `share` is the completed share of the steps.
    """

    sentence: str
    mood: str
    run_id: str
    command: str
    security: str
    step: int | None
    total_steps: int | None
    share: float | None
    ranks_here: int
    world_size: int
    restarts: int
    elapsed_s: float
    left_s: float | None


@dataclass(frozen=True)
class Figures:
    """Medians over the recent steps.

    Attributes:
        step: the duration of a step.
        exposed_share: the share of the step in which ranks wait for communication.
        overlap: the share of the communication that overlapped with other work; None without communication.
        parts: the durations of the parts in the order of `PARTS`.
        predicted: the duration of a step whose calls take the predicted time; None without predictions.
    """

    step: float
    samples_per_s: float
    exposed_share: float
    overlap: float | None
    parts: tuple[float, ...]
    predicted: float | None = None


@dataclass(frozen=True)
class RankRow:
    """Row of a rank. `slowness` is its own time divided by the median of all ranks."""

    rank: int
    host: str
    pid: int
    state: str
    doing: str
    step: int | None
    samples_per_s: float
    compute: float
    wait: float
    slowness: float
    memory_nbytes: int
    heard_s: float
    is_blamed: bool


@dataclass(frozen=True)
class WhatIf:
    """Duration of a step, now and if the slowest rank were as fast as the median."""

    sentence: str
    rank: int
    now: float
    then: float


@dataclass(frozen=True)
class StepColumn:
    """Column of a step: the mean of each part over the ranks, and each rank's own time and wait (None if absent).

    `predicted` is the mean duration of the step if its calls had taken the predicted time.
    """

    step: int
    duration: float
    parts: tuple[float, ...]
    compute: tuple[float | None, ...]
    wait: tuple[float | None, ...]
    predicted: float | None = None


@dataclass(frozen=True)
class TimelineLane:
    """Lane of a rank in the timeline, in milliseconds from the timeline's beginning.

    `phases` are (name, begin, end); `buckets` are (ready, sent, done, bytes, name).
    """

    rank: int
    phases: tuple[tuple[str, float, float], ...]
    buckets: tuple[tuple[float, float, float, int, str], ...]


@dataclass(frozen=True)
class Timeline:
    """Timeline of one step of all ranks on one clock, `span` milliseconds long."""

    step: int
    span: float
    lanes: tuple[TimelineLane, ...]


@dataclass(frozen=True)
class LinkRow:
    """Row of a link from a rank to another one, or, with the peer -1, of shared memory.

    Unknown values are None. `is_slow` marks the links between a pair of hosts that is slower than the others.
    """

    rank: int
    peer: int
    kind: str
    nbytes_per_s: int
    delivers_nbytes_per_s: int | None = None
    round_trip: float | None = None
    variation: float | None = None
    retransmits: int | None = None
    is_slow: bool = False


@dataclass(frozen=True)
class CallRow:
    """Row of one kind of calls: their recent number, and the predicted and the actual duration of one.

    The engine chose the algorithm by the prediction. `is_far` marks an actual duration that differs by a fifth or more.
    """

    name: str
    calls: int
    predicted: float
    actual: float
    is_far: bool


@dataclass(frozen=True)
class Point:
    """A logged value: the mean over the ranks that logged it, the smallest and the largest."""

    name: str
    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class DashboardState:
    """State of a job at one instant, as it is shown; the field names are those of the page's JSON."""

    header: JobHeader
    figures: Figures | None = None
    ranks: tuple[RankRow, ...] = ()
    what_if: WhatIf | None = None
    steps: Growing[StepColumn] = field(default_factory=Growing)
    timeline: Timeline | None = None
    curves: Growing[Point] = field(default_factory=Growing)
    links: tuple[LinkRow, ...] = ()
    network: str | None = None  # the description of a slow pair of hosts
    calls: tuple[CallRow, ...] = ()
    story: Growing[JobEvent] = field(default_factory=Growing)
    log: Growing[Line] = field(default_factory=Growing)
    verdict: StallNotice | None = None
    stacks: tuple[Stack, ...] = ()


def in_ms(seconds: float) -> float:
    """Converts seconds to milliseconds, rounded to two decimals."""
    return round(seconds * 1e3, 2)


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
    """Curve of one name over all steps, with a limited number of points.

    When there are too many, each pair of neighbours is merged into one point with the smallest and the largest value,
    so a spike remains visible after a million steps.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._stride = 1  # the number of values in a point
        self._open: list[Point] = []
        self.points: list[Point] = []
        self.epoch = 0

    def until(self, step: int) -> Thinned:
        """Returns the curve without the points from a step on."""
        rest = Thinned(self._most)
        rest.points = [point for point in self.points if point.step < step]
        rest._stride = self._stride
        rest.epoch = self.epoch + 1
        return rest

    def add(self, point: Point) -> list[Point]:
        """Adds a value; returns the points that it completes. If `epoch` changes, all points are new."""
        self._open.append(point)
        if len(self._open) < self._stride:
            return []
        done = _joined(self._open)
        self._open = []
        self.points.append(done)
        if len(self.points) >= self._most:
            self.points = [_joined(self.points[index : index + 2]) for index in range(0, len(self.points), 2)]
            self._stride *= 2
            self.epoch += 1
        return [done]


def _joined(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    mean = sum(point.mean for point in points) / len(points)
    low, high = min(point.low for point in points), max(point.high for point in points)
    return Point(points[-1].name, points[-1].step, mean, low, high)
