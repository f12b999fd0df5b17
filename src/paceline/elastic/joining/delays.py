"""How long a donor has waited for a learner that is slower than the training, and when the user is told."""

from __future__ import annotations

from dataclasses import dataclass

_GROWS = 2.0  # it is worth a line again when the total has grown by this factor...
_LEAST_S = 1.0  # ... and by this much


@dataclass
class Delays:
    """The waits for one learner."""

    learner: str
    count: int = 0
    total_s: float = 0.0
    _said_s: float = -1.0  # the total that the user knows of

    def waited(self, for_s: float) -> str | None:
        """Notes a wait; returns what the user is told, which is something at first, and then seldom."""
        self.count += 1
        self.total_s += for_s
        if self._said_s >= 0 and self.total_s < max(_GROWS * self._said_s, self._said_s + _LEAST_S):
            return None
        return self._told()

    def over(self) -> str | None:
        """Returns what the user is told at the end, unless he knows it."""
        return self._told() if self.total_s > max(self._said_s, 0.0) else None

    def _told(self) -> str:
        self._said_s = self.total_s
        times = "once" if self.count == 1 else f"{self.count} times"
        who = f"worker {self.learner}, which learns more slowly"
        return f"the others waited for {who}: {times}, {self.total_s:.1f} s in all"
