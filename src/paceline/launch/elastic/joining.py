"""Connects a launcher of an elastic job on several machines to the meeting; each of them can serve it later."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from paceline.launch.elastic.asking import UnreachableError, reach
from paceline.launch.elastic.deputy import Deputy
from paceline.launch.elastic.endpoint_caller import EndpointCaller
from paceline.launch.elastic.follower import Follower
from paceline.launch.elastic.options import ElasticOptions
from paceline.launch.elastic.steering import ElasticSteering
from paceline.launch.job import Job
from paceline.launch.nodes.meeting import JobMovedError, NodeConnection
from paceline.launch.nodes.membership import Policy
from paceline.launch.nodes.remote_client import connect_in_time
from paceline.launch.nodes.server import MeetingServer
from paceline.launch.nodes.sightings import Sightings
from paceline.launch.nodes.steering import Steering
from paceline.launch.nodes.viewing import Viewing
from paceline.security.doorkeeper import Listener
from paceline.security.encryption import Connection
from paceline.store.tcp import PortInUseError, listen

_REACH_S = 5.0


def join_elastic(
    job: Job,
    options: ElasticOptions,
    secret: bytes | None,
    say: Callable[[str], None],
    address: tuple[str, int],
    listener: Listener | None,
    policy: Policy,
    steering: Steering | None,
) -> NodeConnection:
    """Connects this machine to the meeting at `address`, which it serves on `listener` if it has one.

    If the job is known to run already, it connects to the launcher that coordinates that, and shows others who come to
    `address` the way.

    Another machine listens on the same port of its own address, or on any if that is taken: there the others find it
    when it coordinates the job.
    """
    rendezvous = job.rendezvous
    deputy = Deputy(policy, options, cast("ElasticSteering | None", steering))
    server = _serve(listener, secret, deputy, rendezvous.silence_s) if listener is not None else None
    try:
        connection = _connect(job, secret, say, server.address if server is not None else address)
        own = rendezvous.local_address or str(connection.getsockname()[0]).partition("%")[0]
        if server is None:
            server = _serve(_listen(own, address[1], secret), secret, deputy, rendezvous.silence_s)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    follower = Follower(connection, secret, job, deputy)
    caller = None if listener is not None else EndpointCaller(address, secret, follower.running, deputy.is_here)
    return NodeConnection(follower, own, server, deputy, serves=steering is not None, caller=caller)


def _connect(job: Job, secret: bytes | None, say: Callable[[str], None], meeting: tuple[str, int]) -> Connection:
    """Connects to the launcher that coordinates the job, or to the meeting.

    Raises:
        JobMovedError: the job that runs already has another coordinator by now, or has ended.
        RendezvousTimeoutError: nobody served the meeting in time.
    """
    rendezvous = job.rendezvous
    if rendezvous.running is None:
        return connect_in_time(meeting, secret, rendezvous.join_timeout_s, say)
    try:
        return reach(rendezvous.running[1], secret, _REACH_S)
    except UnreachableError as error:
        raise JobMovedError(str(error)) from error


def _serve(listener: Listener, secret: bytes | None, deputy: Deputy, silence_s: float) -> MeetingServer:
    server = MeetingServer(listener, secret, Viewing(Sightings(deputy, "slot")), silence_s)
    deputy.wake = server.wake
    return server


def _listen(host: str, port: int, secret: bytes | None) -> Listener:
    try:
        return listen(host, port, secret)
    except PortInUseError:
        return listen(host, 0, secret)
