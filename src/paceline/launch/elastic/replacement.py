"""Decides whether and when another worker takes the place of one that has ended, without a process or a clock."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto

from paceline.elastic.messages import LEFT_OUT, Finished, FromWorker, Installed, Leaving

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
SOON_S = 60.0  # a worker that fails earlier than this after it took part has failed soon
MOST_SOON = 3  # the slot is given up with the third failure soon after taking part
MOST_FAILED_STARTS = 4  # ... with the fourth worker in a row that fails before it takes part
MOST_KILLED_STARTS = 10  # ... with the tenth in a row that somebody kills before it takes part

_CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP)
)


class Fate(Enum):
    """Why a worker has ended."""

    DONE = auto()  # its script is over
    LEFT = auto()  # it was asked to leave
    REFUSED = auto()  # the coordinator does not let it take part
    RELEASED = auto()  # the others went on without it, and another may come
    KILLED = auto()  # something outside the script ended it
    FAILED = auto()  # its script failed, or crashed


@dataclass
class Life:
    """What is known of a worker that matters when it ends.

    Attributes:
        took_part_s: when it first entered a view.
        is_leaving: it said that it leaves.
        has_finished: it said that its loop is over.
        dismissed: the exit code with which it was dismissed.
        is_stalled: the coordinator was told that it is frozen.
        is_fenced: the launcher killed it, because it was frozen.
    """

    took_part_s: float | None = None
    is_leaving: bool = False
    has_finished: bool = False
    dismissed: int | None = None
    is_stalled: bool = False
    is_fenced: bool = False

    def heard(self, message: FromWorker, now_s: float) -> None:
        """Takes a message of the worker."""
        match message:
            case Installed():
                self.took_part_s = self.took_part_s or now_s
            case Leaving():
                self.is_leaving = True
            case Finished():
                self.has_finished = True


def fate_of(life: Life, exit_code: int, has_record: bool, is_out_of_memory: bool) -> Fate:
    """Returns why a worker has ended.

    Args:
        life: what it did before.
        exit_code: as in subprocess, negative for a signal.
        has_record: it left an exception other than a Ctrl-C.
        is_out_of_memory: the kernel killed it, because memory ran out.
    """
    if life.dismissed:
        return Fate.REFUSED
    if life.is_leaving or exit_code == -signal.SIGTERM:
        return Fate.LEFT
    if exit_code == 0:
        return Fate.DONE if life.has_finished or life.dismissed is None else Fate.RELEASED
    if life.dismissed is not None or exit_code == LEFT_OUT:
        return Fate.RELEASED
    if has_record or is_out_of_memory or exit_code > 0 or -exit_code in _CRASHES:
        return Fate.KILLED if life.is_fenced else Fate.FAILED
    return Fate.KILLED


@dataclass(frozen=True)
class Replace:
    """Another worker takes the place, after a pause."""

    after_s: float


@dataclass(frozen=True)
class Close:
    """Nobody takes the place; `reason` is None if all went as it should."""

    reason: str | None


@dataclass
class Slot:
    """The history of one slot.

    A worker that somebody kills after it took part says nothing about the script, so it is replaced at once however
    often that happens. Workers that fail by themselves, or that are killed before they take part, are replaced after
    longer and longer pauses, and not for ever.
    """

    failed_starts: int = 0
    killed_starts: int = 0
    soon: int = 0

    def ended(self, fate: Fate, life: Life, now_s: float) -> Replace | Close:
        """Returns what follows the end of a worker."""
        if fate in (Fate.DONE, Fate.LEFT):
            return Close(None)
        if fate is Fate.REFUSED:
            return Close("it does not fit the others, and another like it would not either")
        if life.has_finished:
            return Close("it had finished its loop, and what follows cannot be done again")
        if fate is Fate.RELEASED:
            return Replace(0.0)
        if life.took_part_s is None:
            return self._not_started(fate)
        self.failed_starts = self.killed_starts = 0
        if fate is Fate.KILLED:
            return Replace(0.0)
        self.soon = self.soon + 1 if now_s - life.took_part_s < SOON_S else 0
        if self.soon >= MOST_SOON:
            return Close(f"{self.soon} of its workers in a row failed within {SOON_S:.0f} s of taking part")
        return Replace(pause_s(self.soon))

    def _not_started(self, fate: Fate) -> Replace | Close:
        if fate is Fate.KILLED:
            self.killed_starts += 1
            if self.killed_starts >= MOST_KILLED_STARTS:
                return Close(f"{self.killed_starts} of its workers in a row were killed before they took part")
            return Replace(pause_s(self.killed_starts))
        self.failed_starts += 1
        if self.failed_starts >= MOST_FAILED_STARTS:
            return Close(f"{self.failed_starts} of its workers in a row failed before they took part")
        return Replace(pause_s(self.failed_starts))


def pause_s(in_a_row: int) -> float:
    """Returns how long to wait after the n-th failure in a row: not at all, then 0.25 s, 0.5 s, up to 30 s."""
    return 0.0 if in_a_row < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(in_a_row - 2, 30))
