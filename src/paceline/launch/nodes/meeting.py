"""Opens a node's line to the meeting, and serves it where that is this machine's part."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import StoreConnectionError
from paceline.launch.job import Job, Meeting
from paceline.launch.nodes.client import Line, LocalLine
from paceline.launch.nodes.link import dial
from paceline.launch.nodes.membership import Policy
from paceline.launch.nodes.server import MeetingServer
from paceline.security.secret import is_loopback
from paceline.store.tcp import PortInUseError, listen


@dataclass
class Opened:
    """A line, the address by which this node is known, and the server if it is here."""

    line: Line
    address: str
    server: MeetingServer | None = None

    def close(self) -> None:
        """Hangs up; a server waits a little for the others to do so."""
        self.line.close()
        if self.server is not None:
            self.server.close()


def open_meeting(
    job: Job, secret: bytes | None, say: Callable[[str], None], listener: socket.socket | None = None
) -> Opened:
    """Opens the line of this machine.

    Args:
        job: says where the machines meet.
        secret: the job's.
        say: tells the user what is waited for.
        listener: serve on this socket.

    Raises:
        StoreConnectionError: this machine is to serve, and cannot.
        RendezvousTimeoutError, AuthenticationError, ValueError: see `dial`.
    """
    meeting = job.meeting
    policy = Policy(
        run_id=job.run_id,
        min_nodes=meeting.min_nodes,
        max_nodes=meeting.max_nodes,
        is_static=meeting.is_static,
        max_restarts=job.max_restarts,
        last_call_s=meeting.last_call_s,
        join_timeout_s=meeting.join_timeout_s,
        port=job.port,
    )
    if meeting.address is None:
        return Opened(LocalLine(policy), "127.0.0.1")
    address = meeting.address
    server = None
    if listener is None and meeting.serves is not False:
        listener = _listener(meeting, address, secret)
    if listener is not None:
        server = MeetingServer(listener, secret, policy, meeting.silence_s)
        address = server.address
    try:
        link = dial(address, secret, meeting.join_timeout_s, meeting.silence_s, say)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    return Opened(link, meeting.local_address or link.local_address.partition("%")[0], server)


def _listener(meeting: Meeting, address: tuple[str, int], secret: bytes | None) -> socket.socket | None:
    """A listening socket if the address is this machine's and no other launcher serves there."""
    host = host_to_serve_on(address[0], bool(meeting.serves))
    try:
        return None if host is None else listen(host, address[1], secret)
    except StoreConnectionError as error:
        if not meeting.serves and isinstance(error, PortInUseError):
            return None  # the launcher that came first on this machine serves
        if meeting.serves:
            raise
    return None


def host_to_serve_on(name: str, serves: bool) -> str | None:
    """`name`, or this machine's address if the name leads to loopback here only, as /etc/hosts of many systems says.

    A name that is not known yet, as a pod's own may not be, is this machine's if it `serves`, else another's: None.
    """
    if name == "localhost" or name.replace(".", "").isdecimal() or ":" in name:
        return name
    try:
        addresses = [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return own_address() if serves else None
    return own_address() if all(map(is_loopback, addresses)) else name


def own_address() -> str:
    """The address with which this machine would reach others."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # RFC 5737, RFC 3849
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"
