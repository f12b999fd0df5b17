"""EncryptedSocket: a TLS 1.3 connection between machines, with a certificate derived from the job's secret.

The core implements TLS. `handshake.py` decides which connections are encrypted.
"""

from __future__ import annotations

import socket
from functools import lru_cache
from types import TracebackType

from paceline import _core
from paceline.comm.security.secret import derive_key

CLIENT_HELLO = b"\x16"  # the type of the first TLS record; Paceline's own handshake begins with a letter
# A fatal alert, no_application_protocol (RFC 7301), from a port multiplexer that has received no header.
TLS_WITHOUT_HEADER = b"\x15\x03\x03\x00\x02\x02\x78"
_FOREVER_S = 1e9


class EncryptedSocket:
    """A TLS connection with the socket methods that Paceline uses."""

    def __init__(self, plain: socket.socket, secret: bytes | None, accepts: bool) -> None:
        self._plain = plain
        self._core = _core.TlsConnection(identity_of(secret), plain.fileno(), accepts)
        self._timeout_s: float | None = None
        self.family = plain.family
        self.fileno = plain.fileno
        self.getpeername = plain.getpeername
        self.getsockname = plain.getsockname
        self.setsockopt = plain.setsockopt
        self.getsockopt = plain.getsockopt
        self.shutdown = plain.shutdown
        self.close = plain.close

    def __enter__(self) -> EncryptedSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def handshake(self, timeout_s: float) -> str:
        """Performs the TLS handshake; returns the reason for a failure, or an empty string on success.

        Raises an OSError if the handshake does not complete within `timeout_s` seconds.
        """
        return self._core.handshake(timeout_s)

    def settimeout(self, timeout_s: float | None) -> None:
        """Sets the timeout of `sendall` and `recv` in seconds; None means no limit, and 0 means non-blocking."""
        self._timeout_s = timeout_s

    def sendall(self, data: bytes | memoryview) -> None:
        """Sends `data`. Raises an OSError after a timeout, or if the connection is broken."""
        self._core.send(bytes(data), self._limit_s())

    def recv(self, nbytes: int) -> bytes:
        """Receives at most 16 KiB of data; returns no bytes if the peer has closed the connection.

        Raises an OSError after a timeout, or if the connection is broken.
        """
        return self._core.receive(nbytes, self._limit_s())

    def recv_into(self, memory: memoryview) -> int:
        """Receives data into the beginning of `memory` like `recv`; returns the number of bytes."""
        data = self.recv(len(memory))
        memory[: len(data)] = data
        return len(data)

    def recv_now(self, nbytes: int) -> bytes:
        """Receives data like `recv`, but raises a BlockingIOError instead of waiting for the rest of a TLS record."""
        try:
            return self._core.receive(nbytes, 0.0)
        except TimeoutError as error:
            raise BlockingIOError(str(error)) from None

    def release(self) -> _core.TlsConnection:
        """Releases the connection to the core, which then closes the socket."""
        self._plain.detach()
        return self._core

    def _limit_s(self) -> float:
        return _FOREVER_S if self._timeout_s is None else self._timeout_s


Connection = socket.socket | EncryptedSocket


@lru_cache(maxsize=4)
def identity_of(secret: bytes | None) -> _core.TlsIdentity:
    """Returns the certificate derived from a job's secret. Raises a ValueError if no suitable OpenSSL is installed."""
    try:
        return _core.TlsIdentity(derive_key(secret, "tls certificate"))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def is_between_machines(connection: Connection) -> bool:
    """Returns True if a connection may lead to another machine; only Unix sockets never do."""
    return connection.family != socket.AF_UNIX


def plain(connection: Connection) -> socket.socket:
    """Returns the plain socket of a connection within a machine."""
    assert isinstance(connection, socket.socket)
    return connection


def receive_now(connection: Connection, nbytes: int) -> bytes:
    """Receives data from a readable connection, or raises a BlockingIOError if a TLS record is still incomplete."""
    if isinstance(connection, EncryptedSocket):
        return connection.recv_now(nbytes)
    return connection.recv(nbytes)


def release_to_core(connection: Connection) -> int | _core.TlsConnection:
    """Releases a connection to the core, which then closes it."""
    return connection.release() if isinstance(connection, EncryptedSocket) else connection.detach()
