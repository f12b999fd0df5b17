"""Carries what other machines see of their ranks to the launcher that serves the live page, while somebody looks at it.

It stands around the state machine that decides what the nodes do, and is one itself: without sockets or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.launch.nodes.around import Around
from paceline.launch.nodes.messages import AskStacks, Join, Report, Seen, Watching
from paceline.launch.nodes.steering import Orders


@dataclass
class Viewing(Around):
    """A steering that also answers `Watching`, `AskStacks` and `Seen`; `inner` decides everything else."""

    _is_watched: bool = False

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""
        if isinstance(report, Watching):
            self._is_watched = report.is_on
        if isinstance(report, Watching | AskStacks):
            return [(other, report) for other in self._others()]
        if isinstance(report, Seen):
            return [(other, report) for other in self._serving()]
        orders = super().reported(node, report, now_s)
        if isinstance(report, Join) and self._is_watched and not report.serves:
            orders = [*orders, (node, Watching(True))]
        return orders
