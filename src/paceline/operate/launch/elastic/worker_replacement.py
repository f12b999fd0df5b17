"""Decides whether and when another worker takes the place of one that has ended, without a process or a clock.

Which slots of a machine wait for a worker, until when, and which get none any more: without a process or a clock.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto

from paceline.train.elastic.protocol import LEFT_OUT, FromWorker, Installed, Leaving, LoopFinished

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
SOON_S = 60.0  # a worker that fails earlier than this after it took part has failed soon
MOST_SOON = 3  # the slot is given up with the third failure soon after taking part
MOST_FAILED_STARTS = 4  # ... with the fourth worker in a row that fails before it takes part
MOST_KILLED_STARTS = 10  # ... with the tenth in a row that somebody kills before it takes part

_CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP)
)


class ExitCause(Enum):
    """Why a worker has ended."""

    DONE = auto()  # its script is over
    LEFT = auto()  # it was asked to leave
    REFUSED = auto()  # the coordinator does not let it take part
    RELEASED = auto()  # the others went on without it, and another may come
    KILLED = auto()  # something outside the script ended it
    FAILED = auto()  # its script failed, or crashed


@dataclass
class WorkerHistory:
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
            case LoopFinished():
                self.has_finished = True


def exit_cause_of(life: WorkerHistory, exit_code: int, has_record: bool, is_out_of_memory: bool) -> ExitCause:
    """Returns why a worker has ended.

    Args:
        life: what it did before.
        exit_code: as in subprocess, negative for a signal.
        has_record: it left an exception other than a Ctrl-C.
        is_out_of_memory: the kernel killed it, because memory ran out.
    """
    if life.dismissed:
        return ExitCause.REFUSED
    if life.is_leaving or exit_code == -signal.SIGTERM:
        return ExitCause.LEFT
    if exit_code == 0:
        return ExitCause.DONE if life.has_finished or life.dismissed is None else ExitCause.RELEASED
    if life.dismissed is not None or exit_code == LEFT_OUT:
        return ExitCause.RELEASED
    if has_record or is_out_of_memory or exit_code > 0 or -exit_code in _CRASHES:
        return ExitCause.KILLED if life.is_fenced else ExitCause.FAILED
    return ExitCause.KILLED


@dataclass(frozen=True)
class ReplaceWorker:
    """Another worker takes the place, after a pause."""

    after_s: float


@dataclass(frozen=True)
class CloseSlot:
    """Nobody takes the place; `reason` is None if all went as it should."""

    reason: str | None


@dataclass
class SlotHistory:
    """The history of one slot.

    A worker that somebody kills after it took part says nothing about the script, so it is replaced at once however
    often that happens. Workers that fail by themselves, or that are killed before they take part, are replaced after
    longer and longer pauses, and not for ever.
    """

    failed_starts: int = 0
    killed_starts: int = 0
    soon: int = 0

    def ended(self, fate: ExitCause, life: WorkerHistory, now_s: float) -> ReplaceWorker | CloseSlot:
        """Returns what follows the end of a worker."""
        if fate in (ExitCause.DONE, ExitCause.LEFT):
            return CloseSlot(None)
        if fate is ExitCause.REFUSED:
            return CloseSlot("it does not fit the others, and another like it would not either")
        if life.has_finished:
            return CloseSlot("it had finished its loop, and what follows cannot be done again")
        if fate is ExitCause.RELEASED:
            return ReplaceWorker(0.0)
        if life.took_part_s is None:
            return self._not_started(fate)
        self.failed_starts = self.killed_starts = 0
        if fate is ExitCause.KILLED:
            return ReplaceWorker(0.0)
        self.soon = self.soon + 1 if now_s - life.took_part_s < SOON_S else 0
        if self.soon >= MOST_SOON:
            return CloseSlot(f"{self.soon} of its workers in a row failed within {SOON_S:.0f} s of taking part")
        return ReplaceWorker(pause_s(self.soon))

    def _not_started(self, fate: ExitCause) -> ReplaceWorker | CloseSlot:
        if fate is ExitCause.KILLED:
            self.killed_starts += 1
            if self.killed_starts >= MOST_KILLED_STARTS:
                return CloseSlot(f"{self.killed_starts} of its workers in a row were killed before they took part")
            return ReplaceWorker(pause_s(self.killed_starts))
        self.failed_starts += 1
        if self.failed_starts >= MOST_FAILED_STARTS:
            return CloseSlot(f"{self.failed_starts} of its workers in a row failed before they took part")
        return ReplaceWorker(pause_s(self.failed_starts))


def pause_s(in_a_row: int) -> float:
    """Returns how long to wait after the n-th failure in a row: not at all, then 0.25 s, 0.5 s, up to 30 s."""
    return 0.0 if in_a_row < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(in_a_row - 2, 30))


class SlotTable:
    """The slots of a machine, all of which are due at first.

    Args:
        count: how many there are.
        now_s: the time.
        most_replacements: how many of this machine's workers may be replaced in all; None for no bound.
    """

    def __init__(self, count: int, now_s: float, most_replacements: int | None = None) -> None:
        self._slots = {slot: SlotHistory() for slot in range(count)}  # those that are open
        self._due_s = dict.fromkeys(range(count), now_s)  # those of them that wait for a worker
        self._most_replacements = most_replacements
        self._replaces = True
        self.replacements = 0

    @property
    def count(self) -> int:
        """How many slots have a worker, or will have one."""
        return len(self._slots)

    @property
    def deadline_s(self) -> float | None:
        """When the next slot is due; None while none waits."""
        return min(self._due_s.values(), default=None)

    def due(self, now_s: float) -> list[int]:
        """Returns the slots that are to get a worker now, which from then on they have."""
        due = [slot for slot, due_s in self._due_s.items() if now_s >= due_s]
        for slot in due:
            del self._due_s[slot]
        return due

    def ended(self, slot: int, fate: ExitCause, life: WorkerHistory, now_s: float) -> ReplaceWorker | CloseSlot:
        """Returns what follows the end of the worker of a slot."""
        if slot not in self._slots:
            return CloseSlot(None)
        decision = self._slots[slot].ended(fate, life, now_s)
        if isinstance(decision, ReplaceWorker):
            if not self._replaces:
                decision = CloseSlot("no worker is replaced any more")
            elif self._most_replacements is not None and self.replacements >= self._most_replacements:
                decision = CloseSlot(
                    f"--max-restarts {self._most_replacements} allows no further replacement on this machine"
                )
            else:
                self.replacements += 1
                self._due_s[slot] = now_s + decision.after_s
                return decision
        del self._slots[slot]
        return decision

    def close(self, running: set[int]) -> None:
        """Replaces nobody from now on: only the slots `running` stay open, until their workers end."""
        self._slots = {slot: history for slot, history in self._slots.items() if slot in running}
        self._due_s.clear()
        self._replaces = False
