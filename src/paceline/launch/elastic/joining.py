"""Connects a launcher of an elastic job on several machines to the meeting; each of them can serve it later."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from paceline.launch.elastic.deputy import Deputy
from paceline.launch.elastic.follower import Follower
from paceline.launch.elastic.options import ElasticOptions
from paceline.launch.elastic.steering import ElasticSteering
from paceline.launch.job import Job
from paceline.launch.nodes.meeting import NodeConnection
from paceline.launch.nodes.membership import Policy
from paceline.launch.nodes.remote_client import connect_in_time
from paceline.launch.nodes.server import MeetingServer
from paceline.launch.nodes.sightings import Sightings
from paceline.launch.nodes.steering import Steering
from paceline.launch.nodes.viewing import Viewing
from paceline.security.doorkeeper import Listener
from paceline.store.tcp import PortInUseError, listen


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

    Another machine listens on the same port of its own address, or on any if that is taken: there the others find it
    when it coordinates the job.
    """
    rendezvous = job.rendezvous
    deputy = Deputy(policy, options, cast("ElasticSteering | None", steering))
    server = _serve(listener, secret, deputy, rendezvous.silence_s) if listener is not None else None
    try:
        meeting = server.address if server is not None else address
        connection = connect_in_time(meeting, secret, rendezvous.join_timeout_s, say)
        own = rendezvous.local_address or str(connection.getsockname()[0]).partition("%")[0]
        if server is None:
            server = _serve(_listen(own, address[1], secret), secret, deputy, rendezvous.silence_s)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    follower = Follower(connection, secret, job, deputy)
    return NodeConnection(follower, own, server, deputy, serves=listener is not None)


def _serve(listener: Listener, secret: bytes | None, deputy: Deputy, silence_s: float) -> MeetingServer:
    server = MeetingServer(listener, secret, Viewing(Sightings(deputy, "slot")), silence_s)
    deputy.wake = server.wake
    return server


def _listen(host: str, port: int, secret: bytes | None) -> Listener:
    try:
        return listen(host, port, secret)
    except PortInUseError:
        return listen(host, 0, secret)
