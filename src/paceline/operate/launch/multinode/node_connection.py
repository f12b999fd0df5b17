"""Connection from this node to the rendezvous, and the rendezvous server if this machine runs it.

A launcher sends reports and receives orders through a `RendezvousClient`. A job on a single machine does not need a
socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from paceline.comm.one_port.dialer import DEFAULT_ROUTE_TARGETS, resolver_name, source_address
from paceline.comm.security.secret import is_loopback
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.launch.multinode.membership import JobController
from paceline.operate.launch.multinode.protocol import Order, Report
from paceline.operate.launch.multinode.server import RendezvousServer


class RendezvousClient(ABC):
    """A launcher's access to the rendezvous, with a queue of orders for the launcher's event loop."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._queueing = threading.Lock()
        self._waiting, self._waking = os.pipe()  # holds one byte while there are orders
        self._has_queue = True

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `receive` must be called even if nothing is readable, or None."""
        return None

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""
        return self._waiting

    @abstractmethod
    def clock_offset(self) -> Offset | None:
        """Returns the estimated offset to the clock of the machine that hosts the rendezvous."""

    @abstractmethod
    def send(self, report: Report) -> None:
        """Sends a report without blocking for long.

        If the connection is lost, delivers a `JobEnded` and raises no exception.
        """

    def put(self, order: Order) -> None:
        """Adds an order to the queue, on any thread."""
        with self._queueing:
            if self._has_queue:
                if not self._orders:
                    os.write(self._waking, b".")
                self._orders.append(order)

    def receive(self) -> list[Order]:
        """Returns the orders that have arrived."""
        with self._queueing:
            if self._orders:
                os.read(self._waiting, 1)
            orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Disconnects. Idempotent."""
        with self._queueing:
            if self._has_queue:
                self._has_queue = False
                self._orders = []
                os.close(self._waiting)
                os.close(self._waking)


class LocalClient(RendezvousClient):
    """The rendezvous of a job on a single machine; the controller runs in this process."""

    def __init__(self, controller: JobController) -> None:
        super().__init__()
        self._controller = controller

    @property
    def deadline_s(self) -> float | None:
        """The controller's deadline (monotonic), or None."""
        return self._controller.deadline_s

    def clock_offset(self) -> Offset | None:
        """Returns an offset of 0, because the rendezvous is in this process."""
        return Offset(0, 0, time.monotonic_ns())

    def send(self, report: Report) -> None:
        """Passes a report to the controller."""
        for _, order in self._controller.reported("local", report, time.monotonic()):
            self.put(order)

    def receive(self) -> list[Order]:
        """Returns the orders that have arrived, and those that are due."""
        for _, order in self._controller.tick(time.monotonic()):
            self.put(order)
        return super().receive()


class JobMovedError(Exception):
    """Raised if the coordinator of the elastic job to join is no longer at the known address."""


@dataclass
class NodeConnection:
    """A client of the rendezvous, with the address of this node."""

    client: RendezvousClient
    address: str  # the address at which other nodes can reach this machine
    server: RendezvousServer | None = None  # in an elastic job, every launcher runs a server
    serves: bool = True  # whether this launcher hosts the rendezvous
    coordinates: Callable[[], bool] = lambda: False  # whether this launcher coordinates an elastic job

    @property
    def listens(self) -> str:
        """The address at which other launchers in an elastic job can reach this one, or "" without a server."""
        if self.server is None:
            return ""
        host, port = self.server.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Disconnects. A server first waits briefly for the other nodes to disconnect."""
        self.client.close()
        if self.server is not None:
            self.server.close()


def host_to_serve_on(name: str, serves: bool) -> str | None:
    """Returns the host to listen on, or None if the name belongs to another machine.

    The host is `name`, or this machine's own address if `name` resolves only to loopback, which many systems configure
    in /etc/hosts. A name that does not resolve yet, such as the name of a starting pod, is considered this machine's
    name only if `serves` is true.
    """
    if name == "localhost" or name.replace(".", "").isdecimal() or ":" in name:
        return name
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(resolver_name(name), None, type=socket.SOCK_STREAM)]
    except OSError:
        return own_address() if serves else None
    return own_address() if all(map(is_loopback, addresses)) else name


def own_address() -> str:
    """Returns this machine's source address for its route to other machines, or loopback if there is no route."""
    for target in DEFAULT_ROUTE_TARGETS:
        with contextlib.suppress(OSError):
            return source_address(target)
    return "127.0.0.1"
