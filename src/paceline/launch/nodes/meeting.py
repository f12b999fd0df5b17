"""Connects this node to the meeting, and serves the meeting if that is this machine's part."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import StoreConnectionError
from paceline.launch.job import Job, RendezvousOptions
from paceline.launch.nodes.client import LocalClient, MeetingClient
from paceline.launch.nodes.membership import Membership, Policy
from paceline.launch.nodes.remote_client import dial
from paceline.launch.nodes.server import MeetingServer
from paceline.launch.nodes.sightings import Sightings
from paceline.launch.nodes.steering import Steering
from paceline.launch.nodes.viewing import Viewing
from paceline.routes import ELSEWHERE, for_resolver, source_address
from paceline.security.doorkeeper import Listener
from paceline.security.levels import is_loopback
from paceline.store.tcp import PortInUseError, listen

if TYPE_CHECKING:
    from paceline.launch.elastic.deputy import Deputy
    from paceline.launch.elastic.endpoint_caller import EndpointCaller


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
    deputy: Deputy | None = None
    serves: bool = True
    caller: EndpointCaller | None = None

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
    job: Job, secret: bytes | None, say: Callable[[str], None], listener: Listener | None = None
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
            LocalClient(Viewing(Sightings(_steering(job), "rank" if job.elastic is None else "slot"))), "127.0.0.1"
        )
    address = options.address
    server = None
    if listener is None and options.serves is not False:
        listener = _listener(options, address, secret)
    steering = _steering(job) if listener is not None and options.running is None else None
    if job.elastic is not None:
        from paceline.launch.elastic.joining import join_elastic

        return join_elastic(job, job.elastic, secret, say, address, listener, _policy(job), steering)
    if listener is not None and steering is not None:
        server = MeetingServer(listener, secret, Viewing(Sightings(steering)), options.silence_s, bears_starvation=True)
        address = server.address
    try:
        client = dial(address, secret, options.join_timeout_s, options.silence_s, say)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    own = options.local_address or client.local_address.partition("%")[0]
    return NodeConnection(client, own, server, serves=server is not None)


def _steering(job: Job) -> Steering:
    """Returns the state machine that decides what the machines of this job do."""
    policy, now_s = _policy(job), time.monotonic()
    if job.elastic is None:
        return Membership(policy, now_s)
    from paceline.launch.elastic.steering import ElasticSteering

    return ElasticSteering(policy, job.elastic, now_s)


def _policy(job: Job) -> Policy:
    options = job.rendezvous
    return Policy(
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


def _listener(options: RendezvousOptions, address: tuple[str, int], secret: bytes | None) -> Listener | None:
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
        addresses = [str(each[4][0]) for each in socket.getaddrinfo(for_resolver(name), None, type=socket.SOCK_STREAM)]
    except OSError:
        return own_address() if serves else None
    return own_address() if all(map(is_loopback, addresses)) else name


def own_address() -> str:
    """Returns the address with which this machine would reach others; loopback if it has no route to any."""
    for target in ELSEWHERE:
        with contextlib.suppress(OSError):
            return source_address(target)
    return "127.0.0.1"
