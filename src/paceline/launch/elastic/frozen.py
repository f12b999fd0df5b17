"""Notices workers that are stopped, as by SIGSTOP, and have not been continued within a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

PATIENCE_S = 1.0  # after so long, a stopped worker is frozen; one that is only slow never is


@dataclass
class StopWatch:
    """Which processes are stopped, and since when."""

    since_s: dict[int, float] = field(default_factory=dict)
    _looked_s: float = 0.0

    def look(self, stopped: Iterable[int], now_s: float) -> None:
        """Takes the process ids of those that are stopped now."""
        self.since_s = {pid: self.since_s.get(pid, now_s) for pid in stopped}
        self._looked_s = now_s

    def frozen(self, now_s: float) -> list[int]:
        """Returns those that have been stopped for too long."""
        return [pid for pid, since_s in self.since_s.items() if now_s - since_s >= PATIENCE_S]

    @property
    def deadline_s(self) -> float | None:
        """When to look again; None while nobody is stopped."""
        known_s = [
            self._looked_s if pid in self.frozen(self._looked_s) else since_s for pid, since_s in self.since_s.items()
        ]
        return min(known_s) + PATIENCE_S if known_s else None


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped by a signal; one that a debugger holds is not."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as status:
        return status.read().rpartition(b")")[2].split()[0] == b"T"
    return False
