"""Listener that admits only peers that have the job's secret."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import (
    TIMEOUT_S,
    ForeignJobError,
    PeerGoneError,
    PeerHello,
    encrypt_as_server,
    verify,
)
from paceline.comm.security.untrusted_peers import PendingConnections, RejectedConnections, origin_of_connection
from paceline.errors import AuthenticationError
from paceline.linux import is_out_of_descriptors

MAX_HANDSHAKES = 128
_PAUSE_S = 0.05  # pause after a failed `accept`, for example when descriptors run out


class ListeningEndpoint(Protocol):
    """Interface of a listening socket."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Waits for a connection; returns it and its peer's address."""

    def getsockname(self) -> Any:
        """Returns the endpoint's address; over TCP, it begins with the host and the port."""

    def setblocking(self, flag: bool, /) -> None:
        """Sets whether `accept` blocks."""

    def shutdown(self, how: int, /) -> None:
        """Wakes the thread that is blocked in `accept`, if any."""

    def close(self) -> None:
        """Closes the descriptor."""

    def fileno(self) -> int:
        """Returns the descriptor."""


class AuthenticatedListener:
    """Accepts connections on one thread, and authenticates each connection on a separate thread.

    At most `MAX_HANDSHAKES` handshakes may be in progress. Beyond this limit, the oldest connection from the user or
    host with the most handshakes is closed, so that silent peers cannot block others. Rejected connections are logged,
    except those that the peer closes without having sent invalid data.

    Args:
        listener: the listening socket, which this object closes.
        key: the key whose possession the peer must prove.
        channel: the name (at most eight letters) of the channel that the peer must request.
        admit: a function that is called with each admitted connection, on the connection's thread. It must close the
            connection.
        generation: the generation to which the peer must belong.
        secret: the job's secret, which determines the certificate of encrypted connections.
        on_foreign_job: a function that is called with the host of a peer that reports a running job with another
            secret. The report is not authenticated.
    """

    def __init__(
        self,
        listener: ListeningEndpoint,
        key: bytes,
        channel: str,
        admit: Callable[[Connection, PeerHello], None],
        generation: int = 0,
        secret: bytes | None = None,
        on_foreign_job: Callable[[str], None] | None = None,
    ) -> None:
        self._on_foreign_job = on_foreign_job
        self._listener = listener
        self._listener.setblocking(True)
        self._key = key
        self._channel = channel
        self._admit = admit
        self._generation = generation
        self._secret = secret
        self._rejected = RejectedConnections(channel)
        self._handshakes: PendingConnections[socket.socket] = PendingConnections(MAX_HANDSHAKES, origin_of_connection)
        self._changing = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._shortage: OSError | None = None
        self._thread = threading.Thread(target=self._accept, name="paceline-accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port of the listener."""
        port: int = self._listener.getsockname()[1]
        return port

    def require_descriptors(self) -> None:
        """Raises the latest error from `accept` if it was caused by a shortage of descriptors."""
        if self._shortage is not None:
            raise self._shortage

    def close(self) -> None:
        """Closes the listener and all pending connections; idempotent, and without effect in a forked child."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        with self._changing:
            for connection in self._handshakes:
                _end(connection)
        self._rejected.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    self._shortage = error if is_out_of_descriptors(error) else None
                    time.sleep(_PAUSE_S)
                continue
            _disable_nagle(connection)
            with self._changing:
                crowded_out = self._handshakes.add(connection)
                if crowded_out is not None:
                    _end(crowded_out)
            host = str(address[0]) if isinstance(address, tuple) else ""  # empty for a Unix socket
            try:
                threading.Thread(target=self._check, args=(connection, host), daemon=True).start()
            except RuntimeError:  # the system cannot start another thread
                self._leave(connection)
                connection.close()

    def _check(self, connection: socket.socket, host: str) -> None:
        has_proved = False
        try:
            by_s = time.monotonic() + TIMEOUT_S
            checked = encrypt_as_server(connection, self._secret, TIMEOUT_S)
            hello = verify(checked, self._key, self._channel, self._generation, by_s - time.monotonic())
            has_proved = True
            if self._leave(connection) and not self._closed:
                checked.settimeout(None)
                self._admit(checked, hello)
                return
        except (AuthenticationError, OSError) as error:
            was_dropped = not (self._leave(connection) or has_proved)
            if not self._closed:  # connections closed by `close` do not count as rejected
                self._log(host, error, was_dropped)
                if isinstance(error, ForeignJobError) and self._on_foreign_job is not None:
                    self._on_foreign_job(host)
        finally:
            self._leave(connection)
        connection.close()

    def _log(self, host: str, error: Exception, was_dropped: bool) -> None:
        """Logs a rejected connection unless the peer closed it, since the death of a process is reported elsewhere."""
        if was_dropped:
            self._rejected.add(host, f"{host or 'it'} sent nothing while {MAX_HANDSHAKES} others connected")
        elif not isinstance(error, (PeerGoneError, ConnectionError)):
            self._rejected.add(host, error)

    def _leave(self, connection: socket.socket) -> bool:
        with self._changing:
            return self._handshakes.remove(connection)


def _disable_nagle(connection: socket.socket) -> None:
    """Sets TCP_NODELAY, because Nagle's algorithm may delay a short message by up to 40 ms."""
    if connection.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):  # the peer has closed the connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # the thread of this connection closes it
