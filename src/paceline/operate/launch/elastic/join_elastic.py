"""Connects a launcher of an elastic job on several machines to the meeting; each of them can serve it later.

Tells a launcher that newly listens where an elastic job's machines meet that the job runs already.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import cast

from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import HandshakeUnfinishedError
from paceline.comm.store.tcp_store import PortInUseError, listen
from paceline.errors import AuthenticationError
from paceline.operate.launch.elastic.coordinator_client import (
    CoordinatorClient,
    LauncherUnreachableError,
    connect_to_launcher,
)
from paceline.operate.launch.elastic.elastic_controller import ElasticController
from paceline.operate.launch.elastic.elastic_options import ElasticOptions
from paceline.operate.launch.elastic.standby_controller import StandbyController
from paceline.operate.launch.job import Job
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay, DiagnosisCollector
from paceline.operate.launch.multinode.membership import JobController, MembershipPolicy
from paceline.operate.launch.multinode.node_connection import JobMovedError, NodeConnection
from paceline.operate.launch.multinode.protocol import Answered, Inbox, MessageError, Running, encode
from paceline.operate.launch.multinode.remote_client import connect, connect_in_time
from paceline.operate.launch.multinode.server import MeetingServer

_PAUSE_S = 0.25
_LONG_PAUSE_S = 10.0  # after something else than a launcher with the job's secret has answered
_DIAL_S = 0.5
_ANSWER_S = 1.0


class RunningJobAnnouncer:
    """Calls at the address again and again, on a thread of its own, while nobody of the job listens there.

    The launcher that the job began with may be started again by whoever watches over it, with the same command. It
    cannot know where the others are, but they know its address.

    Args:
        address: where the machines of the job were told to meet; its name is looked up for each call.
        secret: the job's.
        running: returns what is to be told; None while another launcher of the job is to tell it, or nobody.
        is_here: returns whether the machine of that number is connected to this launcher, which coordinates the job.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes | None,
        running: Callable[[], Running | None],
        is_here: Callable[[int], bool],
    ) -> None:
        self._address, self._secret = address, secret
        self._running, self._is_here = running, is_here
        self._pause_s = _PAUSE_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-caller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Calls no more; idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        listens_there = -1  # the machine of the job that has answered last
        while not self._closed.wait(self._pause_s):
            self._pause_s = _PAUSE_S
            running = self._running()
            if running is None or (listens_there >= 0 and self._is_here(listens_there)):
                continue
            try:
                listens_there = self._call(running)
            except (AuthenticationError, HandshakeUnfinishedError, MessageError, ValueError):
                self._pause_s = _LONG_PAUSE_S
            except OSError:
                listens_there = -1

    def _call(self, running: Running) -> int:
        """Returns the number of the machine that listens there, if it takes part in the job; otherwise -1."""
        with contextlib.closing(connect(self._address, self._secret, _DIAL_S)) as connection:
            connection.sendall(encode(running))
            return _answer(connection, time.monotonic() + _ANSWER_S)


def _answer(connection: Connection, until_s: float) -> int:
    inbox = Inbox()
    while (left_s := until_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        data = connection.recv(1 << 16)
        for message in inbox.feed(data):
            if isinstance(message, Answered):
                return message.number
        if not data:
            break
    return -1


_REACH_S = 5.0


def join_elastic(
    job: Job,
    options: ElasticOptions,
    secret: bytes | None,
    say: Callable[[str], None],
    address: tuple[str, int],
    listener: ListeningEndpoint | None,
    policy: MembershipPolicy,
    steering: JobController | None,
) -> NodeConnection:
    """Connects this machine to the meeting at `address`, which it serves on `listener` if it has one.

    If the job is known to run already, it connects to the launcher that coordinates that, and shows others who come to
    `address` the way.

    Another machine listens on the same port of its own address, or on any if that is taken: there the others find it
    when it coordinates the job.
    """
    rendezvous = job.rendezvous
    deputy = StandbyController(policy, options, cast("ElasticController | None", steering))
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
    follower = CoordinatorClient(connection, secret, job, deputy)
    caller = None if listener is not None else RunningJobAnnouncer(address, secret, follower.running, deputy.is_here)
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
        return connect_to_launcher(rendezvous.running[1], secret, _REACH_S)
    except LauncherUnreachableError as error:
        raise JobMovedError(str(error)) from error


def _serve(
    listener: ListeningEndpoint, secret: bytes | None, deputy: StandbyController, silence_s: float
) -> MeetingServer:
    server = MeetingServer(listener, secret, DashboardRelay(DiagnosisCollector(deputy, "slot")), silence_s)
    deputy.wake = server.wake
    return server


def _listen(host: str, port: int, secret: bytes | None) -> ListeningEndpoint:
    try:
        return listen(host, port, secret)
    except PortInUseError:
        return listen(host, 0, secret)
