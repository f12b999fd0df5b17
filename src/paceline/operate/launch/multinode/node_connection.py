"""Connection from this node to the rendezvous, and the rendezvous server if this machine runs it.

A launcher sends reports and receives orders through a `RendezvousClient`. A job on a single machine does not need a
socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.comm.one_port.dialer import DEFAULT_ROUTE_TARGETS, resolver_name, source_address
from paceline.comm.security.secret import is_loopback
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.launch.multinode.membership import JobController, Orders
from paceline.operate.launch.multinode.protocol import Order, Report
from paceline.operate.launch.multinode.server import RendezvousServer


class RendezvousClient(Protocol):
    """A launcher's access to the rendezvous."""

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) at which `receive` must be called even if nothing is readable, or None."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""

    def clock_offset(self) -> Offset | None:
        """Returns the estimated offset to the clock of the machine that hosts the rendezvous."""

    def send(self, report: Report) -> None:
        """Sends a report without blocking for long.

        If the connection is lost, delivers a `JobEnded` and raises no exception.
        """

    def receive(self) -> list[Order]:
        """Returns the orders that have arrived."""

    def close(self) -> None:
        """Disconnects. Idempotent."""


class LocalClient:
    """The rendezvous of a job on a single machine; the controller runs in this process."""

    def __init__(self, controller: JobController) -> None:
        self._controller = controller
        self._orders: list[Order] = []
        self._waiting, self._waking = os.pipe()
        self._closed = False

    @property
    def deadline_s(self) -> float | None:
        """The controller's deadline (monotonic), or None."""
        return self._controller.deadline_s

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""
        return self._waiting

    def clock_offset(self) -> Offset | None:
        """Returns an offset of 0, because the rendezvous is in this process."""
        return Offset(0, 0, time.monotonic_ns())

    def send(self, report: Report) -> None:
        """Passes a report to the controller."""
        self._take(self._controller.reported("local", report, time.monotonic()))

    def receive(self) -> list[Order]:
        """Returns the orders that have arrived."""
        if self._orders:
            os.read(self._waiting, 4096)
        self._take(self._controller.tick(time.monotonic()))
        orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Closes the pipe. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._waiting)
            os.close(self._waking)

    def _take(self, orders: Orders) -> None:
        self._orders += [order for _, order in orders]
        if orders:
            os.write(self._waking, b"." * len(orders))


class JobMovedError(Exception):
    """Raised if the coordinator of the elastic job to join is no longer at the known address."""


@dataclass
class NodeConnection:
    """A client of the rendezvous, with the address of this node.

    Attributes:
        client: The client of the rendezvous.
        address: The address at which other nodes can reach this machine.
        server: This launcher's rendezvous server, or None. In an elastic job, every launcher runs a server.
        serves: Whether this launcher hosts the rendezvous.
        coordinates: A function that returns True while this launcher coordinates an elastic job on several machines.
    """

    client: RendezvousClient
    address: str
    server: RendezvousServer | None = None
    serves: bool = True
    coordinates: Callable[[], bool] = lambda: False

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
