"""State of a job as displayed by the page, `paceline top` and the report: one immutable `DashboardState`.

Durations are in milliseconds, as displayed, except those with the suffix `_s`, which are in seconds. Append-only lists
have the type `AppendOnlyList`, so that a viewer that already has the beginning of a list fetches only the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.operate.dashboard.job_sample import JobEvent, Line, Stack, StallNotice


def about(seconds: float) -> str:
    """Formats a duration with one or two units.

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


Item = TypeVar("Item")

PARTS = ("data", "forward", "backward", "exposed", "optimizer", "other")
"""The parts of a step, in stacking order. `exposed` is the time spent waiting for communication."""


@dataclass(frozen=True)
class AppendOnlyList(Generic[Item]):
    """The latest items in an append-only list.

    Attributes:
        items: the items kept.
        first: the index of the first item kept; earlier items were dropped.
        epoch: a number that changes whenever earlier items change. A viewer must then fetch all items again.
    """

    items: tuple[Item, ...] = ()
    first: int = 0
    epoch: int = 0

    @property
    def end(self) -> int:
        """The index of the next item."""
        return self.first + len(self.items)


@dataclass(frozen=True)
class JobHeader:
    """A one-sentence summary of the job's state, with key figures.

    `health` is "good", "waiting", "bad" or "over" and selects the color. `share` is the fraction of steps completed.
    """

    sentence: str
    health: str
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
    """Means over the recent steps without stalls.

    Attributes:
        step: the duration of a step.
        exposed_share: the fraction of the step during which ranks wait for communication.
        overlap: the fraction of communication that overlaps with other work; None without communication.
        parts: the durations of the step's parts in the order of `PARTS`.
        predicted: the duration that a step would have if its calls took the predicted time; None without predictions.
    """

    step: float
    samples_per_s: float
    exposed_share: float
    overlap: float | None
    parts: tuple[float, ...]
    predicted: float | None = None


@dataclass(frozen=True)
class RankRow:
    """A row in the table of ranks.

    `slowness` is the rank's own time divided by the median over all ranks. `is_slow` marks a straggler
    (`operate/diagnosis/stragglers.py`).
    """

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
    is_slow: bool
    memory_nbytes: int
    silent_s: float
    is_blamed: bool


@dataclass(frozen=True)
class StragglerEstimate:
    """Duration of a step, and its estimated duration if the stragglers (`ranks`) were as fast as the other ranks."""

    sentence: str
    ranks: tuple[int, ...]
    now: float
    then: float


@dataclass(frozen=True)
class StepColumn:
    """Data for one step: the mean of each part over all ranks, and each rank's own and waiting time (None if absent).

    `predicted` is the mean duration that the step would have had if its calls had taken the predicted time.
    """

    step: int
    duration: float
    parts: tuple[float, ...]
    compute: tuple[float | None, ...]
    wait: tuple[float | None, ...]
    predicted: float | None = None


@dataclass(frozen=True)
class TimelineLane:
    """One rank's lane in the timeline, in milliseconds from the start of the timeline.

    `phases` are (name, begin, end); `buckets` are (ready, sent, done, bytes, name).
    """

    rank: int
    phases: tuple[tuple[str, float, float], ...]
    buckets: tuple[tuple[float, float, float, int, str], ...]


@dataclass(frozen=True)
class Timeline:
    """Timeline of one step on all ranks, on a common clock and `span` milliseconds long."""

    step: int
    span: float
    lanes: tuple[TimelineLane, ...]


@dataclass(frozen=True)
class LinkRow:
    """A row for a link from one rank to another, or for shared memory if the peer is -1.

    Unknown values are None. `is_slow` is set if the two hosts have slower links than other pairs of hosts.
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
    """A row for one kind of call: the number of recent calls, and the predicted and actual durations of one call.

    The engine uses these predictions to choose an algorithm. `is_far` is set if the actual duration differs from the
    prediction by more than 20%.
    """

    name: str
    calls: int
    predicted: float
    actual: float
    is_far: bool


@dataclass(frozen=True)
class Point:
    """A logged value: the mean, minimum and maximum over the ranks that logged it."""

    name: str
    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class DashboardState:
    """The displayed state of a job at one instant. The page's JSON uses the same field names."""

    header: JobHeader
    figures: Figures | None = None
    ranks: tuple[RankRow, ...] = ()
    what_if: StragglerEstimate | None = None
    steps: AppendOnlyList[StepColumn] = field(default_factory=AppendOnlyList)
    timeline: Timeline | None = None
    curves: AppendOnlyList[Point] = field(default_factory=AppendOnlyList)
    links: tuple[LinkRow, ...] = ()
    network: str | None = None  # description of a slow pair of hosts
    owed: tuple[str, ...] = ()  # calls in which ranks are waiting for others, one sentence each
    calls: tuple[CallRow, ...] = ()
    events: AppendOnlyList[JobEvent] = field(default_factory=AppendOnlyList)
    log: AppendOnlyList[Line] = field(default_factory=AppendOnlyList)
    verdict: StallNotice | None = None
    stacks: tuple[Stack, ...] = ()


def in_ms(seconds: float) -> float:
    """Converts seconds to milliseconds, rounded to two decimals."""
    return round(seconds * 1e3, 2)


class Tail(Generic[Item]):
    """An append-only list that keeps only its last `most` items."""

    def __init__(self, most: int) -> None:
        self._items: deque[Item] = deque(maxlen=most)
        self._count = 0
        self._latest: AppendOnlyList[Item] | None = None

    def extend(self, items: Iterable[Item]) -> None:
        """Appends items."""
        before = self._count
        for item in items:
            self._items.append(item)
            self._count += 1
        if self._count != before:
            self._latest = None

    def latest(self) -> AppendOnlyList[Item]:
        """Returns the items; returns the same object until more items are appended."""
        if self._latest is None:
            self._latest = AppendOnlyList(tuple(self._items), self._count - len(self._items))
        return self._latest


class DownsampledCurve:
    """The curve of one logged metric over all steps, with a limited number of points.

    If the limit is exceeded, pairs of neighboring points are merged. A merged point has the minimum and the maximum of
    both, so a spike remains visible even after a million steps.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._stride = 1  # number of values merged into each point
        self._open: list[Point] = []
        self.points: list[Point] = []
        self.epoch = 0

    def until(self, step: int) -> DownsampledCurve:
        """Returns a copy of the part of the curve before a step."""
        rest = DownsampledCurve(self._most)
        rest.points = [point for point in self.points if point.step < step]
        rest._stride = self._stride
        rest.epoch = self.epoch + 1
        return rest

    def add(self, point: Point) -> list[Point]:
        """Adds a value and returns the points that it completes. If `epoch` changes, all points have changed."""
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
