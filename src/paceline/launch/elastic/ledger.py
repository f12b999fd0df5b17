"""Keeps account of what chaos did to the workers and what it cost, without a process or a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median


@dataclass
class _Loss:
    """A slot whose worker has ended: when, and which others have not entered a view without it yet."""

    since_s: float
    behind: set[str]
    pause_s: float | None = None


@dataclass
class Ledger:
    """The acts, and how long the workers needed to recover from each loss."""

    began_s: float
    acts: Counter[str] = field(default_factory=Counter)
    replaced_s: list[float] = field(default_factory=list)  # from the loss until the replacement takes part
    pauses_s: list[float] = field(default_factory=list)  # from the loss until the others have entered another view
    _losses: dict[int, _Loss] = field(default_factory=dict)  # by slot

    def acted(self, kind: str) -> None:
        """Counts an act."""
        self.acts[kind] += 1

    def lost(self, slot: int, others: set[str], now_s: float) -> None:
        """Notes that the worker of a slot has ended; `others` are those that take part here."""
        for loss in self._losses.values():
            loss.behind &= others
        self._losses[slot] = _Loss(now_s, set(others))

    def entered(self, slot: int, uid: str, is_new: bool, now_s: float) -> None:
        """Notes that a worker has entered a view; `is_new` says that it had taken part in none before."""
        if is_new and slot in self._losses:
            self.replaced_s.append(now_s - self._losses.pop(slot).since_s)
        for loss in self._losses.values():
            if uid in loss.behind:
                loss.behind.discard(uid)
                if not loss.behind:
                    self.pauses_s.append(now_s - loss.since_s)

    def summary(self, title: str, now_s: float) -> list[str]:
        """Returns lines for the user."""
        count = sum(self.acts.values())
        kinds = ", ".join(f"{kind} {times}" for kind, times in sorted(self.acts.items())) or "none"
        lines = [f"chaos ({title}): {count} acts in {now_s - self.began_s:.1f} s ({kinds})"]
        lines.append(
            f"chaos: {len(self.replaced_s)} workers replaced{_spread(self.replaced_s, 'until each took part')}"
        )
        if self.pauses_s:
            lines.append(f"chaos: the others were together again{_spread(self.pauses_s, 'after each loss')}")
        if self._losses:
            slots = ", ".join(map(str, sorted(self._losses)))
            lines.append(f"chaos: nobody had taken the place of the last worker of slot {slots} when the job ended")
        return lines


def _spread(values_s: list[float], what: str) -> str:
    if not values_s:
        return ""
    return f"; {what}: median {median(values_s):.2f} s, longest {max(values_s):.2f} s"
