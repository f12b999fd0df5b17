"""What a launcher needs of the meeting: it sends reports and receives orders. A single machine needs no socket."""

from __future__ import annotations

import os
import time
from typing import Protocol

from paceline.launch.nodes.messages import Order, Report
from paceline.launch.nodes.steering import Orders, Steering
from paceline.observe.clocks import Offset


class MeetingClient(Protocol):
    """A launcher's access to the meeting."""

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) to call `receive` even if nothing is readable; None for never."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""

    def clock_offset(self) -> Offset | None:
        """Returns what is known of the offset to the clock of the machine that serves the meeting."""

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

    def clock_offset(self) -> Offset | None:
        """Returns an offset of 0, since the meeting is here."""
        return Offset(0, 0, time.monotonic_ns())

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
