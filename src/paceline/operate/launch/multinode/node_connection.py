"""Connects this node to the meeting, and serves the meeting if that is this machine's part.

What a launcher needs of the meeting: it sends reports and receives orders. A single machine needs no socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.security.levels import is_loopback
from paceline.comm.store.tcp_store import PortInUseError, listen
from paceline.errors import StoreConnectionError
from paceline.operate.diagnosis.clock_offset import Offset
from paceline.operate.launch.job import Job, RendezvousOptions
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay, DiagnosisCollector
from paceline.operate.launch.multinode.membership import JobController, Membership, MembershipPolicy, Orders
from paceline.operate.launch.multinode.protocol import Order, Report
from paceline.operate.launch.multinode.remote_client import connect_client
from paceline.operate.launch.multinode.server import MeetingServer
from paceline.routes import DEFAULT_ROUTE_TARGETS, resolver_name, source_address

if TYPE_CHECKING:
    from paceline.operate.launch.elastic.join_elastic import RunningJobAnnouncer
    from paceline.operate.launch.elastic.standby_controller import StandbyController


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

    def __init__(self, steering: JobController) -> None:
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


class JobMovedError(Exception):
    """The elastic job that this machine was to join cannot be reached any more where it was coordinated."""


@dataclass
class NodeConnection:
    """A client of the meeting, and the address by which others know this node.

    Attributes:
        client: of the meeting.
        address: of this machine.
        server: of the meeting, if it runs here; the launchers of an elastic job all have one.
        deputy: what that does in an elastic job.
        serves: whether the meeting began here.
        caller: tells those that come to the meeting's address that an elastic job is elsewhere, if it may be.
    """

    client: MeetingClient
    address: str
    server: MeetingServer | None = None
    deputy: StandbyController | None = None
    serves: bool = True
    caller: RunningJobAnnouncer | None = None

    @property
    def listens(self) -> str:
        """Where the launchers of an elastic job reach this one; empty if there is no server."""
        if self.server is None:
            return ""
        host, port = self.server.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Disconnects; a server waits a little for the others to do so."""
        if self.caller is not None:
            self.caller.close()
        self.client.close()
        if self.server is not None:
            self.server.close()


def open_meeting(
    job: Job, secret: bytes | None, say: Callable[[str], None], listener: ListeningEndpoint | None = None
) -> NodeConnection:
    """Connects this machine to the meeting.

    Args:
        job: says where the machines meet.
        secret: the job's secret.
        say: tells the user what the launcher waits for.
        listener: what to serve on, if the caller has opened it.

    Raises:
        StoreConnectionError: this machine should serve the meeting, and cannot.
        RendezvousTimeoutError, AuthenticationError, ValueError: see `dial`.
    """
    options = job.rendezvous
    if options.address is None:
        return NodeConnection(
            LocalClient(DashboardRelay(DiagnosisCollector(_steering(job), "rank" if job.elastic is None else "slot"))),
            "127.0.0.1",
        )
    address = options.address
    server = None
    if listener is None and options.serves is not False:
        listener = _listener(options, address, secret)
    steering = _steering(job) if listener is not None and options.running is None else None
    if job.elastic is not None:
        from paceline.operate.launch.elastic.join_elastic import join_elastic

        return join_elastic(job, job.elastic, secret, say, address, listener, _policy(job), steering)
    if listener is not None and steering is not None:
        server = MeetingServer(
            listener, secret, DashboardRelay(DiagnosisCollector(steering)), options.silence_s, bears_starvation=True
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


def _steering(job: Job) -> JobController:
    """Returns the state machine that decides what the machines of this job do."""
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
    """Returns a listener if the address is this machine's and no other launcher serves there."""
    host = host_to_serve_on(address[0], bool(options.serves))
    try:
        return None if host is None else listen(host, address[1], secret)
    except StoreConnectionError as error:
        if not options.serves and isinstance(error, PortInUseError):
            return None  # the launcher that came first on this machine serves
        if options.serves:
            raise
    return None


def host_to_serve_on(name: str, serves: bool) -> str | None:
    """Returns the host to listen on: `name`, unless it only leads to loopback here, as /etc/hosts of many systems says.

    Then it is this machine's address. A name that is not known yet, as a pod's own may not be, is taken for this
    machine's if it `serves`, otherwise for another machine's: then the result is None.
    """
    if name == "localhost" or name.replace(".", "").isdecimal() or ":" in name:
        return name
    try:
        addresses = [str(each[4][0]) for each in socket.getaddrinfo(resolver_name(name), None, type=socket.SOCK_STREAM)]
    except OSError:
        return own_address() if serves else None
    return own_address() if all(map(is_loopback, addresses)) else name


def own_address() -> str:
    """Returns the address with which this machine would reach others; loopback if it has no route to any."""
    for target in DEFAULT_ROUTE_TARGETS:
        with contextlib.suppress(OSError):
            return source_address(target)
    return "127.0.0.1"
