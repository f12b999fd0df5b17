"""Which slots of a machine wait for a worker, until when, and which get none any more: without a process or a clock."""

from __future__ import annotations

from paceline.launch.elastic.replacement import Close, Fate, Life, Replace, Slot


class Places:
    """The slots of a machine, all of which are due at first.

    Args:
        count: how many there are.
        now_s: the time.
        most_replacements: how many of this machine's workers may be replaced in all; None for no bound.
    """

    def __init__(self, count: int, now_s: float, most_replacements: int | None = None) -> None:
        self._slots = {slot: Slot() for slot in range(count)}  # those that are open
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

    def ended(self, slot: int, fate: Fate, life: Life, now_s: float) -> Replace | Close:
        """Returns what follows the end of the worker of a slot."""
        if slot not in self._slots:
            return Close(None)
        decision = self._slots[slot].ended(fate, life, now_s)
        if isinstance(decision, Replace):
            if not self._replaces:
                decision = Close("no worker is replaced any more")
            elif self._most_replacements is not None and self.replacements >= self._most_replacements:
                decision = Close(
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
