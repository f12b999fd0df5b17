"""What a viewer sees of a job: one immutable `Picture`, as the page, `paceline top` and the report draw it.

Durations are milliseconds here, as they are shown; `_s` marks the few that are seconds. Lists that only grow are
`Growing`, so that a viewer who has seen the beginning needs the rest alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.observe.live.sample import Event, Line, Stack, Verdict

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
class Header:
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
class Lane:
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
    lanes: tuple[Lane, ...]


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
class Picture:
    """All that is shown of a job at one instant."""

    header: Header
    figures: Figures | None = None
    ranks: tuple[RankRow, ...] = ()
    what_if: WhatIf | None = None
    steps: Growing[StepColumn] = field(default_factory=Growing)
    timeline: Timeline | None = None
    curves: Growing[Point] = field(default_factory=Growing)
    links: tuple[LinkRow, ...] = ()
    network: str | None = None  # what to say of the slowest way between hosts
    calls: tuple[CallRow, ...] = ()
    story: Growing[Event] = field(default_factory=Growing)
    log: Growing[Line] = field(default_factory=Growing)
    verdict: Verdict | None = None
    stacks: tuple[Stack, ...] = ()


def in_ms(seconds: float) -> float:
    """Returns milliseconds with as many digits as anybody looks at."""
    return round(seconds * 1e3, 2)
