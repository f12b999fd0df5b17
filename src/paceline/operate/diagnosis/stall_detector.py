"""Stall detector: finds calls that take much longer than earlier calls of the same kind. It does not read a clock.

The launcher imports this module at startup, so the module itself imports little. The rest of the folder is imported
once a call is overdue. An error in a diagnosis does not terminate the job.
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


LOOK_S = 1.5  # time between two samples of a process, long enough to detect whether it is working
CEILING_S = 15.0  # a longer call is always overdue, regardless of the usual duration
FLOOR_S = 10.0  # a shorter call is never overdue
_TIMES_USUAL = 5.0
_FEWEST = 20  # minimum number of calls for a meaningful 99th percentile

T = TypeVar("T")
Default = TypeVar("Default")


def explain_or_default(explain: Callable[[], T], default: Default) -> T | Default:
    """Returns `explain()`, or `default` if `explain` raises an exception, which is reported with its line on stderr."""
    try:
        return explain()
    except Exception as error:  # an error in a diagnosis must not terminate the training job
        frame = traceback.extract_tb(error.__traceback__)[-1]
        sys.stderr.write(
            f"paceline: the recorded data could not be analyzed ({type(error).__name__}: {error}, in {frame.filename}:"
            f"{frame.lineno}); this is a bug in Paceline, and the job continues without the explanation\n"
        )
        return default


@dataclass(frozen=True)
class WatchedWorker:
    """A worker on this machine.

    Attributes:
        number: the worker's number in the job.
        pid: the worker's process id.
        recording: a descriptor for the memory of the worker's recording, or None.
        ending: the worker's exit status, or None if the worker is running or was terminated by the launcher.
        is_running: whether the worker is still running.
        thread_error_file: a file with the exception that ended one of the worker's threads, if there was one; "" if
            such exceptions are not recorded.
    """

    number: int
    pid: int
    recording: int | None
    ending: RankExitStatus | None = None
    is_running: bool = True
    thread_error_file: str = ""


@dataclass(frozen=True)
class StallThreshold:
    """The duration after which a call is overdue: `min(ceiling, max(floor, 5 x the 99th percentile))`."""

    floor_s: float = FLOOR_S
    ceiling_s: float = CEILING_S

    @classmethod
    def of(cls, ceiling_s: float) -> StallThreshold:
        """Returns a threshold with the given ceiling and a floor in proportion to the ceiling."""
        return cls(ceiling_s * FLOOR_S / CEILING_S, ceiling_s)

    @property
    def idle_s(self) -> float:
        """The time after which a job is reported as idle if no rank makes calls or does other work."""
        return 2 * self.ceiling_s

    def limit_s(self, durations_s: Sequence[float]) -> float:
        """Returns the threshold for a call, given the durations of earlier calls of the same kind."""
        if len(durations_s) < _FEWEST:
            return self.floor_s
        ordered = sorted(durations_s)
        usual_s = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return min(self.ceiling_s, max(self.floor_s, _TIMES_USUAL * usual_s))


def kind_of(call: RankCall) -> Hashable:
    """Returns a key shared by calls of similar duration: group, operation, and size rounded to a power of four."""
    return call.group, call.header.operation, call.header.count.bit_length() // 2


def overdue(rank: RankState, now_s: float, patience: StallThreshold) -> RankCall | None:
    """Returns the rank's longest overdue call, or None."""
    waiting = [call for call in rank.calls if call.ended_s is None and now_s - call.arrived_s >= patience.floor_s]
    for call in sorted(waiting, key=lambda call: call.arrived_s):
        earlier = [
            past.ended_s - past.arrived_s
            for past in rank.calls
            if past.ended_s is not None and past.outcome == "ok" and kind_of(past) == kind_of(call)
        ]
        # Ranks may start at different times, so the formation of the first group may take longer than later calls.
        is_start = call is rank.calls[0] and call.header.operation == "new_group"
        if now_s - call.arrived_s >= (patience.idle_s if is_start else patience.limit_s(earlier)):
            return call
    return None


def overdue_since_s(rank: RankState, now_s: float, patience: StallThreshold) -> float | None:
    """Returns the start time of the rank's longest overdue call or wait for a store, or None."""
    call, wait = overdue(rank, now_s, patience), rank.store_wait
    began_s = [] if call is None else [call.arrived_s]
    if wait is not None and now_s - wait.since_s >= patience.ceiling_s:
        began_s.append(wait.since_s)
    return min(began_s, default=None)


@dataclass
class ActivityTracker:
    """Tracks the time of each worker's latest record, so that only the recordings of quiet workers need to be read."""

    quiet_since_s: dict[int, float] = field(default_factory=dict)
    _ticks: dict[int, int] = field(default_factory=dict)

    def note_tick(self, worker: int, tick: int, now_s: float) -> None:
        """Updates the tick of a worker's latest record."""
        if self._ticks.get(worker) != tick:
            self._ticks[worker] = tick
            self.quiet_since_s[worker] = now_s

    def keep(self, workers: Set[int]) -> None:
        """Drops all workers except these."""
        for worker in set(self._ticks) - workers:
            del self._ticks[worker], self.quiet_since_s[worker]

    def quiet(self, now_s: float, for_s: float) -> list[int]:
        """Returns the workers that have recorded nothing for `for_s` seconds."""
        return [worker for worker, since_s in self.quiet_since_s.items() if now_s - since_s >= for_s]


@dataclass
class StallReporter:
    """Reports the diagnosis of a stall whenever the diagnosis changes, and the end of the stall."""

    verdict: Diagnosis | None = None
    since_s: float = 0.0

    def report(self, verdict: Diagnosis, since_s: float) -> str | None:
        """Records a diagnosis; returns the sentence to report, or None."""
        before = self.verdict
        is_new = before is None or (before.cause, before.blamed) != (verdict.cause, verdict.blamed)
        if before is None:
            self.since_s = since_s
        self.verdict = verdict
        return verdict.sentence if is_new else None

    def resumed(self, now_s: float) -> str | None:
        """Records that the job continues; returns a sentence to report if a stall had been reported, otherwise None."""
        if self.verdict is None:
            return None
        text = f"the job continues after {now_s - self.since_s:.0f} s"
        self.verdict = None
        return text
