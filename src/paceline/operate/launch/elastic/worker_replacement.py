"""Decisions on whether and when to replace a worker that has exited. Uses neither processes nor a clock.

`SlotHistory` decides for one slot. `SlotTable` tracks which slots on a machine wait for a worker, and when each wait
ends.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto

from paceline.operate.launch.multinode import membership
from paceline.train.elastic.protocol import LEFT_OUT, FromWorker, LeaveNotice, LoopFinished, ViewInstalled

SOON_S = 60.0  # a failure within this time after the worker entered a view counts as "soon"
# Limits on consecutive failures, after which a slot is closed.
MOST_SOON = 3  # maximum number of failures soon after entering a view
MOST_FAILED_STARTS = 4  # maximum number of failures before entering a view
MOST_KILLED_STARTS = 10  # maximum number of external kills before entering a view

_CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP)
)


class ExitCause(Enum):
    """The cause of a worker's exit."""

    DONE = auto()  # the worker's script completed
    LEFT = auto()  # the worker was asked to leave
    REFUSED = auto()  # the coordinator refused the worker
    RELEASED = auto()  # the other workers continued without this worker, which can be replaced
    KILLED = auto()  # the worker was terminated from outside the script
    FAILED = auto()  # the worker's script failed or crashed


@dataclass
class WorkerHistory:
    """The events that determine how a worker's exit is handled."""

    took_part_s: float | None = None  # the time at which the worker first entered a view
    is_leaving: bool = False  # whether the worker has announced its departure
    has_finished: bool = False  # whether the worker's training loop has completed
    dismissed: int | None = None  # the exit code assigned by the coordinator when it dismissed the worker
    is_stalled: bool = False  # whether the worker was reported to the coordinator as stopped
    is_fenced: bool = False  # whether the launcher killed the worker because it was stopped

    def receive(self, message: FromWorker, now_s: float) -> None:
        """Records a message from the worker."""
        match message:
            case ViewInstalled():
                self.took_part_s = self.took_part_s or now_s
            case LeaveNotice():
                self.is_leaving = True
            case LoopFinished():
                self.has_finished = True


def exit_cause_of(life: WorkerHistory, exit_code: int, has_record: bool, is_out_of_memory: bool) -> ExitCause:
    """Returns the cause of a worker's exit.

    `exit_code` is negative if a signal terminated the worker. `has_record` does not include a KeyboardInterrupt.
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
    """Decision to replace the worker after a pause of `after_s` seconds."""

    after_s: float


@dataclass(frozen=True)
class CloseSlot:
    """Decision not to replace the worker; `reason` is None if the worker exited as intended."""

    reason: str | None


@dataclass
class SlotHistory:
    """The failure history of one slot.

    An external kill after a worker has entered a view does not indicate a defect in the script, so the worker is always
    replaced immediately. Workers that fail on their own, or are killed before they enter a view, are replaced after
    increasing pauses and only a limited number of times.
    """

    failed_starts: int = 0
    killed_starts: int = 0
    soon: int = 0

    def ended(self, fate: ExitCause, life: WorkerHistory, now_s: float) -> ReplaceWorker | CloseSlot:
        """Decides whether to replace a worker that has exited."""
        if fate in (ExitCause.DONE, ExitCause.LEFT):
            return CloseSlot(None)
        if fate is ExitCause.REFUSED:
            return CloseSlot("it is not compatible with the others, and a replacement would not be either")
        if life.has_finished:
            return CloseSlot("it had finished its loop, and the code after the loop cannot be repeated")
        if fate is ExitCause.RELEASED:
            return ReplaceWorker(0.0)
        if life.took_part_s is None:
            return self._not_started(fate)
        self.failed_starts = self.killed_starts = 0
        if fate is ExitCause.KILLED:
            return ReplaceWorker(0.0)
        self.soon = self.soon + 1 if now_s - life.took_part_s < SOON_S else 0
        if self.soon >= MOST_SOON:
            return CloseSlot(f"{self.soon} of its workers in a row failed within {SOON_S:.0f} s of joining")
        return ReplaceWorker(pause_s(self.soon))

    def _not_started(self, fate: ExitCause) -> ReplaceWorker | CloseSlot:
        if fate is ExitCause.KILLED:
            self.killed_starts += 1
            count, most, how = self.killed_starts, MOST_KILLED_STARTS, "were killed"
        else:
            self.failed_starts += 1
            count, most, how = self.failed_starts, MOST_FAILED_STARTS, "failed"
        if count >= most:
            return CloseSlot(f"{count} of its workers in a row {how} before they joined")
        return ReplaceWorker(pause_s(count))


def pause_s(in_a_row: int) -> float:
    """Returns the pause after the n-th consecutive failure: 0 s, then 0.25 s, 0.5 s, up to 30 s."""
    return 0.0 if in_a_row < 2 else membership.pause_s(in_a_row - 1)


class SlotTable:
    """The slots on a machine. Initially, all of them are due for a worker.

    `most_replacements` limits the number of replacements on this machine.
    """

    def __init__(self, count: int, now_s: float, most_replacements: int | None = None) -> None:
        self._slots = {slot: SlotHistory() for slot in range(count)}  # the histories of open slots
        self._due_s = dict.fromkeys(range(count), now_s)  # due times of open slots that wait for a worker
        self._most_replacements = most_replacements
        self._replaces = True
        self.replacements = 0

    @property
    def count(self) -> int:
        """The number of slots that have a worker or are waiting for one."""
        return len(self._slots)

    @property
    def deadline_s(self) -> float | None:
        """The time at which the next slot is due, or None."""
        return min(self._due_s.values(), default=None)

    def due(self, now_s: float) -> list[int]:
        """Returns the slots that are due for a worker, and marks them as filled."""
        due = [slot for slot, due_s in self._due_s.items() if now_s >= due_s]
        for slot in due:
            del self._due_s[slot]
        return due

    def ended(self, slot: int, fate: ExitCause, life: WorkerHistory, now_s: float) -> ReplaceWorker | CloseSlot:
        """Decides whether to replace a slot's worker that has exited."""
        if slot not in self._slots:
            return CloseSlot(None)
        decision = self._slots[slot].ended(fate, life, now_s)
        if isinstance(decision, ReplaceWorker):
            if not self._replaces:
                decision = CloseSlot("workers are no longer replaced")
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
        """Stops replacements. Only the slots in `running` stay open until their workers exit."""
        self._slots = {slot: history for slot, history in self._slots.items() if slot in running}
        self._due_s.clear()
        self._replaces = False
