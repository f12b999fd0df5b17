"""A node's line to the meeting: reports out, orders in. On a single machine there is no socket in it."""

from __future__ import annotations

import os
import time
from typing import Protocol

from paceline.launch.nodes.membership import Membership, Orders, Policy
from paceline.launch.nodes.messages import Failed, Finished, Join, Leave, Order, Report, Stopped


class Line(Protocol):
    """What a launcher needs of the meeting."""

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) to call `receive` unasked."""

    def fileno(self) -> int:
        """Readable while there are orders."""

    def send(self, report: Report) -> None:
        """Reports; never waits for long, and does not fail when the meeting is lost: then an End comes."""

    def receive(self) -> list[Order]:
        """The orders that have come."""

    def close(self) -> None:
        """Hangs up; idempotent."""


def apply(membership: Membership, node: str, report: Report, now_s: float) -> Orders:
    """Hands a node's report to the state machine."""
    if isinstance(report, Join):
        return membership.joined(node, report, now_s)
    if isinstance(report, Failed):
        return membership.failed(node, report, now_s)
    if isinstance(report, Finished):
        return membership.finished(node, report, now_s)
    if isinstance(report, Stopped):
        return membership.stopped(node, report, now_s)
    if isinstance(report, Leave):
        return membership.left(node, report, now_s)
    return []


class LocalLine:
    """The meeting of a single machine, which decides at once."""

    def __init__(self, policy: Policy) -> None:
        self._membership = Membership(policy, time.monotonic())
        self._orders: list[Order] = []
        self._waiting, self._waking = os.pipe()
        self._closed = False

    @property
    def deadline_s(self) -> float | None:
        """When the state machine wants to be asked."""
        return self._membership.deadline_s

    def fileno(self) -> int:
        """Readable while there are orders."""
        return self._waiting

    def send(self, report: Report) -> None:
        """Reports to the state machine."""
        self._take(apply(self._membership, "here", report, time.monotonic()))

    def receive(self) -> list[Order]:
        """The orders that have come."""
        if self._orders:
            os.read(self._waiting, 4096)
        self._take(self._membership.tick(time.monotonic()))
        orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._waiting)
            os.close(self._waking)

    def _take(self, orders: Orders) -> None:
        self._orders += [order for _, order in orders]
        if orders:
            os.write(self._waking, b"." * len(orders))
