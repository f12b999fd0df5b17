"""What the meeting needs of whoever decides: a state machine without sockets or a clock."""

from __future__ import annotations

from typing import Protocol

from paceline.launch.nodes.messages import Order, Report

Orders = list[tuple[str, Order]]  # to whom, what


class Steering(Protocol):
    """Decides what the nodes do; `Membership` for generations, `ElasticSteering` for elastic jobs."""

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called if nothing else happens before; None for never."""

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has ended, and its workers with it."""

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node whose connection was lost, or which was silent for `silent_s`; its workers may live."""

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
