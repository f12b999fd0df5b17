"""Both ends of a connection between ranks. A connection is valid once the accepting end has acknowledged the proof."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable

from paceline.comm.security.encryption import Connection, encrypt_as_client
from paceline.comm.security.handshake import HandshakeUnfinishedError, PeerHello, prove
from paceline.durations import socket_timeout_s

_WELCOME = b"\x01"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


def dial(
    open_connection: Callable[[float], socket.socket],
    key: bytes,
    hello: PeerHello,
    deadline: float,
    secret: bytes | None = None,
) -> Connection:
    """Connects and proves this rank's identity; retries as long as the other end drops connections unread.

    The pause before each new attempt is twice as long as the previous one, but at most half of the remaining time.

    Args:
        open_connection: a function that opens a connection within the given number of seconds.
        key: the secret shared by both ends.
        hello: this rank's first message, which the proof covers.
        deadline: the time on the monotonic clock, in seconds, at which to stop retrying.
        secret: the job's secret, which determines the certificate of encrypted connections.

    Raises:
        OSError: no process listens at that address.
        AuthenticationError: the other end does not have the key, or did not answer in time.
        HandshakeUnfinishedError: the other end still dropped connections at the deadline.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = socket_timeout_s(deadline - time.monotonic())
        plain: socket.socket | None = None
        try:
            plain = open_connection(left_s)
            connection = encrypt_as_client(plain, secret, left_s)
            prove(connection, key, hello, left_s)
            _await_welcome(connection, left_s)
            connection.settimeout(None)
            return connection
        except HandshakeUnfinishedError:
            if plain is not None:
                plain.close()
            left_s = deadline - time.monotonic()
            if left_s <= _FIRST_PAUSE_S:
                raise
            time.sleep(min(pause_s, left_s / 2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except BaseException:
            if plain is not None:
                plain.close()
            raise


def _await_welcome(connection: Connection, timeout_s: float) -> None:
    """Waits for the acknowledgment, because a busy listener may drop a connection before reading the proof."""
    connection.settimeout(timeout_s)
    try:
        if connection.recv(1) == _WELCOME:
            return
    except OSError:
        pass
    raise HandshakeUnfinishedError("the other end closed the connection before it had read the proof")


def acknowledge(connection: Connection) -> None:
    """Acknowledges the proof from the connecting end."""
    connection.sendall(_WELCOME)


class AcceptedConnections:
    """A queue in which accepted connections are passed to the thread that waits for them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PeerHello, Connection]] = queue.SimpleQueue()

    def admit(self, connection: Connection, hello: PeerHello) -> None:
        """Acknowledges the other end's proof and queues the connection."""
        acknowledge(connection)
        self._queue.put((hello, connection))

    def take(self, timeout_s: float) -> tuple[PeerHello, Connection] | None:
        """Returns the next connection, or None if there is none within `timeout_s` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Closes the connections that are still queued."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()[1].close()
