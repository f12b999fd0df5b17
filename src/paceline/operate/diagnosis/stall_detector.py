"""Decides when a job makes no progress, from how long its calls took before; without a clock.

The launcher imports this module at its start, and so it imports little; the rest of the folder follows with a look.

An explanation that fails does not end the job that it should explain.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from paceline.operate.diagnosis.finding import Diagnosis
    from paceline.operate.diagnosis.job_snapshot import RankCall, RankExitStatus, RankState


T = TypeVar("T")
Otherwise = TypeVar("Otherwise")


def explain_or_default(explain: Callable[[], T], otherwise: Otherwise) -> T | Otherwise:
    """Returns what `explain` returns; if it raises, tells so on stderr, with the line, and returns `otherwise`."""
    try:
        return explain()
    except Exception as error:  # whatever it is, training matters more
        place = traceback.extract_tb(error.__traceback__)[-1]
        sys.stderr.write(
            f"paceline: what was recorded could not be explained ({type(error).__name__}: {error}, in {place.filename}:"
            f"{place.lineno}); this is an error of Paceline's, and the job goes on without the explanation\n"
        )
        return otherwise


LOOK_S = 1.5  # what a process does in this time shows whether it works

CEILING_S = 15.0  # a call that lasts longer is looked at, however long such calls usually take
FLOOR_S = 10.0  # one that lasts less is not
_TIMES_USUAL = 5.0
_FEWEST = 20  # with fewer calls, their 99th percentile says nothing


@dataclass(frozen=True)
class WatchedWorker:
    """A worker of this machine; `recording` is a descriptor of the memory that it records into, if there is one."""

    number: int
    pid: int
    recording: int | None
    ending: RankExitStatus | None = None


@dataclass(frozen=True)
class StallThreshold:
    """How long a call may last before it is looked at: `min(ceiling, max(floor, 5 x the 99th percentile))`."""

    floor_s: float = FLOOR_S
    ceiling_s: float = CEILING_S

    @classmethod
    def of(cls, ceiling_s: float) -> StallThreshold:
        """Returns the patience with another ceiling, and a floor in proportion."""
        return cls(ceiling_s * FLOOR_S / CEILING_S, ceiling_s)

    def limit_s(self, durations_s: Sequence[float]) -> float:
        """Returns how long a call may last, if the earlier ones of its kind lasted this long."""
        if len(durations_s) < _FEWEST:
            return self.floor_s
        ordered = sorted(durations_s)
        usual_s = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return min(self.ceiling_s, max(self.floor_s, _TIMES_USUAL * usual_s))


def kind_of(call: RankCall) -> Hashable:
    """Returns what calls have in common that take about as long: group, operation and size, in powers of four."""
    return call.group, call.header.operation, call.header.count.bit_length() // 2


def overdue(rank: RankState, now_s: float, patience: StallThreshold) -> RankCall | None:
    """Returns the call of a rank that lasts too long, and the one that has lasted longest of several."""
    waiting = [call for call in rank.calls if call.ended_s is None and now_s - call.arrived_s >= patience.floor_s]
    for call in sorted(waiting, key=lambda each: each.arrived_s):
        earlier = [
            each.ended_s - each.arrived_s
            for each in rank.calls
            if each.ended_s is not None and each.outcome == "ok" and kind_of(each) == kind_of(call)
        ]
        if now_s - call.arrived_s >= patience.limit_s(earlier):
            return call
    return None


@dataclass
class ActivityTracker:
    """Which recordings have not changed for so long that it is worth reading them."""

    quiet_since_s: dict[int, float] = field(default_factory=dict)
    _ticks: dict[int, int] = field(default_factory=dict)

    def note_tick(self, worker: int, tick: int, now_s: float) -> None:
        """Takes the tick of the latest record of a worker."""
        if self._ticks.get(worker) != tick:
            self._ticks[worker] = tick
            self.quiet_since_s[worker] = now_s

    def keep(self, workers: Set[int]) -> None:
        """Forgets all but these workers."""
        for worker in set(self._ticks) - workers:
            del self._ticks[worker], self.quiet_since_s[worker]

    def quiet(self, now_s: float, for_s: float) -> list[int]:
        """Returns the workers that have recorded nothing for so long."""
        return [worker for worker, since_s in self.quiet_since_s.items() if now_s - since_s >= for_s]


@dataclass
class StallReporter:
    """What the user has been told of a stall. A verdict is said again only if it has changed, and so is its end."""

    verdict: Diagnosis | None = None
    since_s: float = 0.0

    def tell(self, verdict: Diagnosis, since_s: float) -> str | None:
        """Takes the verdict of a look; returns what to say, if anything."""
        before = self.verdict
        is_new = before is None or (before.cause, before.blamed) != (verdict.cause, verdict.blamed)
        if before is None:
            self.since_s = since_s
        self.verdict = verdict
        return verdict.sentence if is_new else None

    def resumed(self, now_s: float) -> str | None:
        """Takes it that the job goes on; returns what to say, if the user has been told that it did not."""
        if self.verdict is None:
            return None
        text = f"the job goes on after {now_s - self.since_s:.0f} s"
        self.verdict = None
        return text
