"""`RemoteClient`: a client for a rendezvous hosted on another machine, connected by a socket.

`ServerConnection` maintains a connection on separate threads, independently of the launcher's event loop.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

from paceline.comm.one_port.dialer import dial, dial_with_secret
from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import HandshakeUnfinishedError, connect_with_secret, warn_of_running_job
from paceline.errors import RendezvousTimeoutError
from paceline.operate.diagnosis.clock_offset import Offset, OffsetEstimate
from paceline.operate.launch.multinode.node_connection import RendezvousClient
from paceline.operate.launch.multinode.protocol import (
    Heartbeat,
    Inbox,
    JobEnded,
    Message,
    Order,
    Report,
    Start,
    StartSlots,
    TimeRequest,
    TimeResponse,
    encode,
)
from paceline.operate.launch.multinode.server import CHANNEL, HEARTBEAT_S, is_starved
from paceline.train.elastic.coordinator.election import ConnectionLoss
from paceline.train.elastic.protocol import ReplicateOrder

_WELCOMES = (Start, StartSlots, ReplicateOrder)  # orders that only an admitted node receives
_RESETS = struct.pack("ii", 1, 0)  # SO_LINGER value that makes close() reset the connection


class ServerConnection:
    """A connection to the rendezvous server. It takes ownership of the socket `connection`.

    Args:
        silence_s: The time in seconds after which a silent connection counts as lost.
        on_order: A function called with each order, on a separate thread.
        on_lost: A function called once with the reason for the loss, on a separate thread.
        bears_starvation: Whether a longer silence is tolerated while the server's machine responds.
        clock_ns: The local clock whose offset to the server's clock is measured.
    """

    def __init__(
        self,
        connection: Connection,
        silence_s: float,
        on_order: Callable[[Order], None],
        on_lost: Callable[[ConnectionLoss, str], None],
        bears_starvation: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._bears_starvation = bears_starvation
        self._offset = OffsetEstimate()
        self._measuring = threading.Lock()
        self._may_request_time = False  # a server with a different version must not receive unknown messages
        self._connection = connection
        self._connection.settimeout(silence_s)
        self.local_address: str = connection.getsockname()[0]
        self.peer = "{}:{}".format(*connection.getpeername()[:2])
        self._silence_s = silence_s
        self._on_order, self._on_lost = on_order, on_lost
        self._last_received_s = time.monotonic()
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="paceline-rendezvous-client", daemon=True)
            for target in (self._read, self._beat)
        ]

    def start(self) -> None:
        """Starts receiving orders."""
        for thread in self._threads:
            thread.start()

    def clock_offset(self) -> Offset | None:
        """Returns the estimated offset to the server's clock."""
        with self._measuring:
            return self._offset.at(self._clock_ns())

    def send(self, report: Report) -> None:
        """Sends a report."""
        with self._sending, contextlib.suppress(OSError):  # the reading thread detects and reports the loss
            self._connection.sendall(encode(report))

    def close(self, *, lives_on: bool = False) -> None:
        """Disconnects.

        Idempotent. If `lives_on` is true, the server does not consider this launcher to have exited.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            if lives_on:
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                self._connection.shutdown(socket.SHUT_RD)
            else:
                self._connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    def _read(self) -> None:
        inbox = Inbox()
        while not self._closed.is_set():
            try:
                data = self._connection.recv(1 << 16)
                self._last_received_s = time.monotonic() if data else self._last_received_s
                for message in inbox.feed(data):
                    self._receive(message)
            except TimeoutError:
                silent_s = max(self._silence_s, time.monotonic() - self._last_received_s)
                if self._bears_starvation and is_starved(self._connection, silent_s, self._silence_s / 2):
                    continue
                self._lost(ConnectionLoss.SILENT, f"nothing was received from it for {silent_s:.2g} s")
                return
            except (OSError, ValueError) as error:  # a ValueError indicates an invalid message
                is_recent = time.monotonic() - self._last_received_s <= self._silence_s
                is_reset = isinstance(error, ConnectionResetError) and is_recent
                self._lost(ConnectionLoss.RESET if is_reset else ConnectionLoss.SILENT, str(error))
                return
            if not data:
                self._lost(ConnectionLoss.ENDED, "it has ended")
                return

    def _receive(self, message: Message) -> None:
        if isinstance(message, TimeResponse):
            with self._measuring:
                self._offset.add(message.requested_ns, message.remote_ns, self._clock_ns())
        elif isinstance(message, Order):
            self._may_request_time = self._may_request_time or isinstance(message, _WELCOMES)
            self._on_order(message)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.send(TimeRequest(self._clock_ns()) if self._may_request_time else Heartbeat())

    def _lost(self, how: ConnectionLoss, why: str) -> None:
        if not self._closed.is_set():
            self._on_lost(how, why)


def connect(address: tuple[str, int], secret: bytes | None, timeout_s: float) -> Connection:
    """Connects to the rendezvous server; both sides authenticate with the secret.

    Raises:
        OSError, HandshakeUnfinishedError: No server is listening on the address.
        AuthenticationError: The server does not hold the job's secret.
        ValueError: The address is not loopback and there is no secret.
    """
    return connect_with_secret(dial_with_secret(address, timeout_s, secret), secret, CHANNEL)


def warn_of_running_job_at(address: tuple[str, int], timeout_s: float) -> None:
    """Reports to the launcher at an address, which has another secret, that this launcher's job is running.

    Raises an OSError or a HandshakeUnfinishedError if no server is listening there.
    """
    with contextlib.closing(dial(address, timeout_s)) as connection:
        warn_of_running_job(connection, timeout_s)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_ATTEMPT_S = 5.0
_SOON_S = 1.0
_ADVICE: dict[type[Exception], str] = {
    socket.gaierror: (
        "Check the name. In Kubernetes the pods have names if there is a headless Service with "
        "publishNotReadyAddresses: true, which `paceline launch-script k8s` prints"
    ),
    Exception: (
        "Check that the launcher of machine 0 is running, that this is its address, and that no firewall blocks the "
        "connection"
    ),
}


class RemoteClient(RendezvousClient):
    """A client whose job ends if the connection to the rendezvous is lost."""

    def __init__(
        self, connection: Connection, silence_s: float, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        super().__init__()
        self._wire = ServerConnection(connection, silence_s, self.put, self._lost, True, clock_ns)
        self.local_address = self._wire.local_address
        self._wire.start()

    def clock_offset(self) -> Offset | None:
        """Returns the estimated offset to the clock of the machine that hosts the rendezvous."""
        return self._wire.clock_offset()

    def send(self, report: Report) -> None:
        """Sends a report."""
        self._wire.send(report)

    def close(self) -> None:
        """Disconnects. Idempotent."""
        self._wire.close()
        super().close()

    def _lost(self, _: ConnectionLoss, why: str) -> None:
        self.put(JobEnded(1, lost_at(self._wire.peer, why)))


def lost_at(peer: str, why: str) -> str:
    """Returns the message for the user if the job ends because the rendezvous was lost."""
    return f"the launcher at {peer}, which hosts the rendezvous, was lost: {why}"


def connect_client(
    address: tuple[str, int],
    secret: bytes | None,
    timeout_s: float,
    silence_s: float,
    print_line: Callable[[str], None],
) -> RemoteClient:
    """Returns a client for the rendezvous once the rendezvous is available; see `connect_in_time`."""
    return RemoteClient(connect_in_time(address, secret, timeout_s, print_line), silence_s)


def connect_in_time(
    address: tuple[str, int], secret: bytes | None, timeout_s: float, print_line: Callable[[str], None]
) -> Connection:
    """Connects once the rendezvous is available. If the wait is long, `print_line` prints a message about it.

    Name resolution is repeated as well, because a pod's name is published only once the pod has started.

    Raises:
        RendezvousTimeoutError: No launcher hosted the rendezvous in time.
        AuthenticationError, ValueError: See `connect`.
    """
    started_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    reported: set[type[Exception]] = set()
    while True:
        left_s = started_s + timeout_s - time.monotonic()
        try:
            attempt_s = min(_ATTEMPT_S if reported else _SOON_S, left_s)
            return connect(address, secret, max(0.1, attempt_s))  # `connect` resolves the name on each attempt
        except (OSError, HandshakeUnfinishedError) as error:
            kind = socket.gaierror if isinstance(error, socket.gaierror) else Exception
            if left_s <= 0:
                raise RendezvousTimeoutError(
                    f"no launcher hosted the rendezvous at {address[0]}:{address[1]} for {timeout_s:.0f} s (the last "
                    f"attempt: {_in_words(error, address[0])}). {_ADVICE[kind]}"
                ) from error
            if kind not in reported and time.monotonic() - started_s >= _SOON_S:
                reported.add(kind)
                print_line(
                    f"waiting up to {timeout_s:.0f} s for a launcher at {address[0]}:{address[1]} "
                    f"({_in_words(error, address[0])})"
                )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _in_words(error: Exception, name: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {name} cannot be resolved yet: {error.strerror}"
    return str(error)
