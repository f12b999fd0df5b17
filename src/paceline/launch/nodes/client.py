"""What a launcher needs of the meeting: it sends reports and receives orders. A single machine needs no socket."""

from __future__ import annotations

import os
import time
from typing import Protocol

from paceline.launch.nodes.messages import Order, Report
from paceline.launch.nodes.steering import Orders, Steering


class MeetingClient(Protocol):
    """A launcher's access to the meeting."""

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) to call `receive` even if nothing is readable; None for never."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""

    def send(self, report: Report) -> None:
        """Sends a report; never waits for long, and does not fail when the meeting is lost: then an End comes."""

    def receive(self) -> list[Order]:
        """Returns the orders that have come."""

    def close(self) -> None:
        """Disconnects; idempotent."""


class LocalClient:
    """The meeting of a single machine, which decides everything at once."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self._orders: list[Order] = []
        self._waiting, self._waking = os.pipe()
        self._closed = False

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) the state machine decides something because time has passed."""
        return self._steering.deadline_s

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""
        return self._waiting

    def send(self, report: Report) -> None:
        """Reports to the state machine."""
        self._take(self._steering.reported("here", report, time.monotonic()))

    def receive(self) -> list[Order]:
        """Returns the orders that have come."""
        if self._orders:
            os.read(self._waiting, 4096)
        self._take(self._steering.tick(time.monotonic()))
        orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Closes the pipe; idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._waiting)
            os.close(self._waking)

    def _take(self, orders: Orders) -> None:
        self._orders += [order for _, order in orders]
        if orders:
            os.write(self._waking, b"." * len(orders))
