"""What a viewer sees of a job: one immutable `Picture`, as the page, `paceline top` and the report draw it.

Durations are milliseconds here, as they are shown; `_s` marks the few that are seconds. Lists that only grow are
`Growing`, so that a viewer who has seen the beginning needs the rest alone.

Writes lengths of time as people say them.

Lists that keep what is worth showing: the end of a long one, or all of it with fewer points.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.operate.dashboard.job_sample import JobEvent, Line, Stack, StallNotice


def about(seconds: float) -> str:
    """Returns a length of time in one unit or two.

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
    """Returns milliseconds with three digits that count.

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
    """The latest items of a list that grows at its end.

    Attributes:
        items: those that are kept.
        first: the number of the first of them; those before it were dropped.
        epoch: changes when items that were there before have changed, so that a viewer needs all of them again.
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
    """The state of the job in one sentence, and the figures that it is made of.

    `mood` is "good", "waiting", "bad" or "over" and chooses the colour. `share` is the part that is done, from 0 to 1.
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
    """Medians over the recent steps: what a step takes, how much of it is waiting, how much communication is hidden.

    `overlap` is the part of the communication that ran behind other work, from 0 to 1; None without communication.
    `predicted` is the step with calls that take what the engine predicts; None where it does not.
    """

    step: float
    samples_per_s: float
    exposed_share: float
    overlap: float | None
    parts: tuple[float, ...]
    predicted: float | None = None


@dataclass(frozen=True)
class RankRow:
    """One rank's row. `slowness` is its own time over the median of all ranks, 1 for the median."""

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
    """What a step takes, and what it would take if one rank were like the median."""

    sentence: str
    rank: int
    now: float
    then: float


@dataclass(frozen=True)
class StepColumn:
    """One step: the mean of each part over the ranks, and the own time and the wait of each rank (None if absent).

    `predicted` is the mean of what the step would have lasted if its calls had taken what the engine predicted.
    """

    step: int
    duration: float
    parts: tuple[float, ...]
    compute: tuple[float | None, ...]
    wait: tuple[float | None, ...]
    predicted: float | None = None


@dataclass(frozen=True)
class TimelineLane:
    """One rank's part of the timeline, in milliseconds after its begin.

    `phases` are (name, begin, end); `buckets` are (ready, sent, done, bytes, name).
    """

    rank: int
    phases: tuple[tuple[str, float, float], ...]
    buckets: tuple[tuple[float, float, float, int, str], ...]


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks on one clock, `span` milliseconds long."""

    step: int
    span: float
    lanes: tuple[TimelineLane, ...]


@dataclass(frozen=True)
class LinkRow:
    """What a rank sends to another one, or, with the peer -1, through shared memory; times are in milliseconds.

    What is not known is None. `is_slow` marks the links of a way between hosts that is slower than the others.
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
    """Calls of one kind: how many there were lately, and what one takes, in milliseconds.

    `predicted` is what the engine chose the algorithm by, and `is_far` says that the actual time differs by a fifth.
    """

    name: str
    calls: int
    predicted: float
    actual: float
    is_far: bool


@dataclass(frozen=True)
class Point:
    """A value that the program logged: the mean over the ranks that logged it, and the smallest and largest."""

    name: str
    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class DashboardState:
    """All that is shown of a job at one instant."""

    header: JobHeader
    figures: Figures | None = None
    ranks: tuple[RankRow, ...] = ()
    what_if: WhatIf | None = None
    steps: Growing[StepColumn] = field(default_factory=Growing)
    timeline: Timeline | None = None
    curves: Growing[Point] = field(default_factory=Growing)
    links: tuple[LinkRow, ...] = ()
    network: str | None = None  # what to say of the slowest way between hosts
    calls: tuple[CallRow, ...] = ()
    story: Growing[JobEvent] = field(default_factory=Growing)
    log: Growing[Line] = field(default_factory=Growing)
    verdict: StallNotice | None = None
    stacks: tuple[Stack, ...] = ()


def in_ms(seconds: float) -> float:
    """Returns milliseconds with as many digits as anybody looks at."""
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
