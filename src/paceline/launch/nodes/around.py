"""A state machine around the one that decides what the nodes do: it answers some reports itself.

It knows which nodes take part, and which of them serves the meeting. Without sockets or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.launch.nodes.messages import Join, Report
from paceline.launch.nodes.steering import Orders, Steering


@dataclass
class Around:
    """A steering that passes everything on to `inner`; subclasses answer what is theirs."""

    inner: Steering
    _serves: dict[str, bool] = field(default_factory=dict, kw_only=True)  # of each node, whether it serves the meeting

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called if nothing else happens before; None for never."""
        return self.inner.deadline_s

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""
        if isinstance(report, Join):
            self._serves[node] = report.serves
        return self.inner.reported(node, report, now_s)

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has ended."""
        self._forget(node)
        return self.inner.ended(node, why, now_s)

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node that was lost."""
        self._forget(node)
        return self.inner.lost(node, why, now_s, silent_s)

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        return self.inner.tick(now_s)

    def _serving(self) -> list[str]:
        """Returns the node that serves the meeting, if it is there."""
        return [node for node, serves in self._serves.items() if serves]

    def _others(self) -> list[str]:
        """Returns the nodes that do not serve the meeting."""
        return [node for node, serves in self._serves.items() if not serves]

    def _forget(self, node: str) -> None:
        self._serves.pop(node, None)
