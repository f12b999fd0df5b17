"""Carries what other machines see of their ranks to the launcher that serves the live page, while somebody looks at it.

It stands around the state machine that decides what the nodes do, and is one itself: without sockets or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.launch.nodes.messages import Join, Report, Seen, Watching
from paceline.launch.nodes.steering import Orders, Steering


@dataclass
class Viewing:
    """A steering that also answers `Watching` and `Seen`; `inner` decides everything else."""

    inner: Steering
    _serves: dict[str, bool] = field(default_factory=dict)  # of each node, whether it serves the meeting
    _is_watched: bool = False

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called if nothing else happens before; None for never."""
        return self.inner.deadline_s

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""
        if isinstance(report, Watching):
            self._is_watched = report.is_on
            return [(other, report) for other, serves in self._serves.items() if not serves]
        if isinstance(report, Seen):
            return [(other, report) for other, serves in self._serves.items() if serves]
        orders = self.inner.reported(node, report, now_s)
        if isinstance(report, Join):
            self._serves[node] = report.serves
            if self._is_watched and not report.serves:
                orders = [*orders, (node, Watching(True))]
        return orders

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has ended."""
        self._serves.pop(node, None)
        return self.inner.ended(node, why, now_s)

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node that was lost."""
        self._serves.pop(node, None)
        return self.inner.lost(node, why, now_s, silent_s)

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        return self.inner.tick(now_s)
