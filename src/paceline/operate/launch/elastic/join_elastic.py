"""Connection of a launcher to an elastic job on several machines, any of which can host the rendezvous later.

`RunningJobAnnouncer` announces the running job to a launcher that has been restarted at the rendezvous address.
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
_LONG_PAUSE_S = 10.0  # pause after a response from a process without the job's secret
_DIAL_S = 0.5
_ANSWER_S = 1.0


class RunningJobAnnouncer:
    """Announces a running job at the rendezvous address while none of the job's launchers listens there.

    A supervisor may restart the job's first launcher with the same command. The restarted launcher does not have the
    addresses of the other launchers, but they have its address. Announcements are sent from a separate thread.

    Args:
        address: The rendezvous address. Its host name is resolved anew for each announcement.
        secret: The job's secret.
        running: A function that returns the notice to send, or None while this launcher must not send a notice.
        is_here: A function that returns whether this launcher coordinates the job and a given machine is connected.
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
        self._thread = threading.Thread(target=self._run, name="paceline-announcer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the announcements. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        listens_there = -1  # number of the job's machine that last responded
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
        """Returns the number of the job's machine that listens at the address, or -1 if none of them does."""
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
    controller: JobController | None,
) -> NodeConnection:
    """Connects this machine to the rendezvous at `address`, or hosts the rendezvous on `listener` if that is given.

    If the job is already running, this machine connects to its coordinator and redirects other launchers that connect
    to `address`. All other machines listen on the same port, or on any free port if that port is taken, because each
    may become the coordinator later.
    """
    rendezvous = job.rendezvous
    standby = StandbyController(policy, options, cast("ElasticController | None", controller))
    server = _serve(listener, secret, standby, rendezvous.silence_s) if listener is not None else None
    try:
        connection = _connect(job, secret, say, server.address if server is not None else address)
        own = rendezvous.local_address or str(connection.getsockname()[0]).partition("%")[0]
        if server is None:
            server = _serve(_listen(own, address[1], secret), secret, standby, rendezvous.silence_s)
    except BaseException:
        if server is not None:
            server.close(0.0)
        raise
    follower = CoordinatorClient(connection, secret, job, standby)
    announcer = (
        None if listener is not None else RunningJobAnnouncer(address, secret, follower.running, standby.is_here)
    )
    return NodeConnection(follower, own, server, standby, serves=controller is not None, announcer=announcer)


def _connect(job: Job, secret: bytes | None, say: Callable[[str], None], meeting: tuple[str, int]) -> Connection:
    """Connects to the coordinator of the job, or to the rendezvous.

    Raises:
        JobMovedError: The running job's coordinator has changed, or the job has ended.
        RendezvousTimeoutError: No launcher hosted the rendezvous before the timeout.
    """
    rendezvous = job.rendezvous
    if rendezvous.running is None:
        return connect_in_time(meeting, secret, rendezvous.join_timeout_s, say)
    try:
        return connect_to_launcher(rendezvous.running[1], secret, _REACH_S)
    except LauncherUnreachableError as error:
        raise JobMovedError(str(error)) from error


def _serve(
    listener: ListeningEndpoint, secret: bytes | None, standby: StandbyController, silence_s: float
) -> MeetingServer:
    server = MeetingServer(listener, secret, DashboardRelay(DiagnosisCollector(standby, "slot")), silence_s)
    standby.wake = server.wake
    return server


def _listen(host: str, port: int, secret: bytes | None) -> ListeningEndpoint:
    try:
        return listen(host, port, secret)
    except PortInUseError:
        return listen(host, 0, secret)
