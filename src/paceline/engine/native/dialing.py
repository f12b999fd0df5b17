"""Both ends of a connection while ranks meet: it counts once the accepting side has read the proof and said so."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable

from paceline.durations import for_socket
from paceline.security.handshake import HandshakeUnfinishedError, Hello, prove

_WELCOME = b"\x01"


def dial(open_connection: Callable[[float], socket.socket], key: bytes, hello: Hello, deadline: float) -> socket.socket:
    """Connects, again where the other end was too busy with strangers, until `deadline` of the monotonic clock.

    Args:
        open_connection: takes the seconds that are left.

    Raises:
        OSError: nobody listens there.
        AuthenticationError: the other end does not hold the key, or did not answer in time.
    """
    while True:
        left_s = for_socket(deadline - time.monotonic())
        connection = open_connection(left_s)
        try:
            prove(connection, key, hello, left_s)
            _await_welcome(connection, left_s)
            connection.settimeout(None)
            return connection
        except HandshakeUnfinishedError:
            connection.close()
            if time.monotonic() >= deadline:
                raise
        except BaseException:
            connection.close()
            raise


def _await_welcome(connection: socket.socket, timeout_s: float) -> None:
    """A crowd of strangers can push this connection out after its proof was sent and before it was read."""
    connection.settimeout(timeout_s)
    try:
        if connection.recv(1) == _WELCOME:
            return
    except OSError:
        pass
    raise HandshakeUnfinishedError("the other end closed the connection before it had read the proof")


class Arrivals:
    """The connections that a doorkeeper has let in, for the thread that waits for them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Hello, socket.socket]] = queue.SimpleQueue()

    def admit(self, connection: socket.socket, hello: Hello) -> None:
        """Tells the other end that it is in."""
        connection.sendall(_WELCOME)
        self._queue.put((hello, connection))

    def take(self, timeout_s: float) -> tuple[Hello, socket.socket] | None:
        """The next one; None if none came in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Closes those that nobody took."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()[1].close()
