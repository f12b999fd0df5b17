"""Connection from this node to the rendezvous, and the rendezvous server if this machine runs it.

A launcher sends reports and receives orders through a `MeetingClient`. A job on a single machine does not need a
socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.comm.one_port.dialer import DEFAULT_ROUTE_TARGETS, resolver_name, source_address
from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.security.secret import is_loopback
from paceline.comm.store.tcp_store import PortInUseError, listen
from paceline.errors import StoreConnectionError
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.launch.job import Job, RendezvousOptions
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay, DiagnosisCollector
from paceline.operate.launch.multinode.membership import JobController, Membership, MembershipPolicy, Orders
from paceline.operate.launch.multinode.protocol import Order, Report
from paceline.operate.launch.multinode.remote_client import connect_client
from paceline.operate.launch.multinode.server import MeetingServer

if TYPE_CHECKING:
    from paceline.operate.launch.elastic.coordinator_client import RunningJobAnnouncer
    from paceline.operate.launch.elastic.standby_controller import StandbyController


class MeetingClient(Protocol):
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
        standby: The controller for that server in an elastic job, or None.
        serves: Whether this launcher hosts the rendezvous.
        announcer: The announcer for an elastic job whose coordinator may not be at the rendezvous address, or None.
    """

    client: MeetingClient
    address: str
    server: MeetingServer | None = None
    standby: StandbyController | None = None
    serves: bool = True
    announcer: RunningJobAnnouncer | None = None

    @property
    def listens(self) -> str:
        """The address at which other launchers in an elastic job can reach this one, or "" without a server."""
        if self.server is None:
            return ""
        host, port = self.server.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Disconnects. A server first waits briefly for the other nodes to disconnect."""
        if self.announcer is not None:
            self.announcer.close()
        self.client.close()
        if self.server is not None:
            self.server.close()


def open_meeting(
    job: Job, secret: bytes | None, say: Callable[[str], None], listener: ListeningEndpoint | None = None
) -> NodeConnection:
    """Connects this machine to the rendezvous.

    Args:
        job: The job's description, with the rendezvous address.
        secret: The job's secret.
        say: A function that prints a line for the user.
        listener: The listener for the server if one is already open, or None.

    Raises:
        StoreConnectionError: This machine should host the rendezvous but cannot.
        RendezvousTimeoutError: No launcher hosted the rendezvous before the timeout.
        AuthenticationError: The server does not have the job's secret.
        ValueError: The address is not a loopback address, and there is no secret.
    """
    options = job.rendezvous
    if options.address is None:
        return NodeConnection(
            LocalClient(
                DashboardRelay(DiagnosisCollector(_controller(job), "rank" if job.elastic is None else "slot"))
            ),
            "127.0.0.1",
        )
    address = options.address
    server = None
    if listener is None and options.serves is not False:
        listener = _listener(options, address, secret)
    controller = _controller(job) if listener is not None and options.running is None else None
    if job.elastic is not None:
        from paceline.operate.launch.elastic.coordinator_client import join_elastic

        return join_elastic(job, job.elastic, secret, say, address, listener, _policy(job), controller)
    if listener is not None and controller is not None:
        server = MeetingServer(
            listener, secret, DashboardRelay(DiagnosisCollector(controller)), options.silence_s, bears_starvation=True
        )
        address = server.address
    try:
        client = connect_client(address, secret, options.join_timeout_s, options.silence_s, say)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    own = options.local_address or client.local_address.partition("%")[0]
    return NodeConnection(client, own, server, serves=server is not None)


def _controller(job: Job) -> JobController:
    """Creates the controller for this job."""
    policy, now_s = _policy(job), time.monotonic()
    if job.elastic is None:
        return Membership(policy, now_s)
    from paceline.operate.launch.elastic.elastic_controller import ElasticController

    return ElasticController(policy, job.elastic, now_s)


def _policy(job: Job) -> MembershipPolicy:
    options = job.rendezvous
    return MembershipPolicy(
        run_id=job.run_id,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        is_static=options.is_static,
        max_restarts=job.max_restarts,
        last_call_s=options.last_call_s,
        join_timeout_s=options.join_timeout_s,
        port=job.port,
        return_timeout_s=options.return_timeout_s,
        meeting_first=job.one_port is not None,
    )


def _listener(options: RendezvousOptions, address: tuple[str, int], secret: bytes | None) -> ListeningEndpoint | None:
    """Returns a listener if the address belongs to this machine and no other launcher already serves there."""
    host = host_to_serve_on(address[0], bool(options.serves))
    try:
        return None if host is None else listen(host, address[1], secret)
    except StoreConnectionError as error:
        if not options.serves and isinstance(error, PortInUseError):
            return None  # another launcher on this machine already hosts the rendezvous
        if options.serves:
            raise
    return None


def host_to_serve_on(name: str, serves: bool) -> str | None:
    """Returns the host to listen on, or None if the name belongs to another machine.

    The host is `name`, or this machine's own address if `name` only resolves to loopback, as many systems configure in
    /etc/hosts. A name that does not resolve yet, such as a starting pod's, only counts as this machine's if `serves` is
    true.
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
