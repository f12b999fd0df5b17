"""Connects this node to the meeting, and serves the meeting if that is this machine's part."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import StoreConnectionError
from paceline.launch.job import Job, RendezvousOptions
from paceline.launch.nodes.client import LocalClient, MeetingClient
from paceline.launch.nodes.membership import Membership, Policy
from paceline.launch.nodes.remote_client import dial
from paceline.launch.nodes.server import MeetingServer
from paceline.launch.nodes.sightings import Sightings
from paceline.launch.nodes.steering import Steering
from paceline.launch.nodes.viewing import Viewing
from paceline.routes import ELSEWHERE, source_address
from paceline.security.secret import is_loopback
from paceline.store.tcp import PortInUseError, listen


@dataclass
class NodeConnection:
    """A client of the meeting, the address by which others know this node, and the server if it runs here."""

    client: MeetingClient
    address: str
    server: MeetingServer | None = None

    def close(self) -> None:
        """Disconnects; a server waits a little for the others to do so."""
        self.client.close()
        if self.server is not None:
            self.server.close()


def open_meeting(
    job: Job, secret: bytes | None, say: Callable[[str], None], listener: socket.socket | None = None
) -> NodeConnection:
    """Connects this machine to the meeting.

    Args:
        job: says where the machines meet.
        secret: the job's secret.
        say: tells the user what the launcher waits for.
        listener: a listening socket to serve on, if the caller has opened one.

    Raises:
        StoreConnectionError: this machine should serve the meeting, and cannot.
        RendezvousTimeoutError, AuthenticationError, ValueError: see `dial`.
    """
    options = job.rendezvous
    if options.address is None:
        return NodeConnection(LocalClient(_steering(job)), "127.0.0.1")
    address = options.address
    server = None
    if listener is None and options.serves is not False:
        listener = _listener(options, address, secret)
    if listener is not None:
        server = MeetingServer(listener, secret, _steering(job), options.silence_s)
        address = server.address
    try:
        client = dial(address, secret, options.join_timeout_s, options.silence_s, say)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    return NodeConnection(client, options.local_address or client.local_address.partition("%")[0], server)


def _steering(job: Job) -> Steering:
    """Returns the state machine that decides what the machines of this job do."""
    options, now_s = job.rendezvous, time.monotonic()
    policy = Policy(
        run_id=job.run_id,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        is_static=options.is_static,
        max_restarts=job.max_restarts,
        last_call_s=options.last_call_s,
        join_timeout_s=options.join_timeout_s,
        port=job.port,
    )
    if job.elastic is None:
        return Viewing(Sightings(Membership(policy, now_s)))
    from paceline.launch.elastic.steering import ElasticSteering

    return Viewing(Sightings(ElasticSteering(policy, job.elastic, now_s), "slot"))


def _listener(options: RendezvousOptions, address: tuple[str, int], secret: bytes | None) -> socket.socket | None:
    """Returns a listening socket if the address is this machine's and no other launcher serves there."""
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
        addresses = [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return own_address() if serves else None
    return own_address() if all(map(is_loopback, addresses)) else name


def own_address() -> str:
    """Returns the address with which this machine would reach others; loopback if it has no route to any."""
    for target in ELSEWHERE:
        with contextlib.suppress(OSError):
            return source_address(target)
    return "127.0.0.1"
