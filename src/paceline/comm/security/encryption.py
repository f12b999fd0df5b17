"""Encryption of connections between machines: TLS 1.3, in the core, with a certificate derived from the job's secret.

The connecting side begins with or without TLS. The accepting side distinguishes the two by the first byte, and rejects
a connection that must be encrypted and is not. The handshake that proves the secret follows, as on every connection.
"""

from __future__ import annotations

import socket
import time
from functools import lru_cache
from types import TracebackType

from paceline import _core
from paceline.comm.security.handshake import interrupted_handshake, name_of, refuse_plain
from paceline.comm.security.levels import chosen_level, must_encrypt
from paceline.comm.security.secret import derive_key
from paceline.errors import AuthenticationError

_CLIENT_HELLO = b"\x16"  # the type of the first record of TLS; Paceline's own handshake begins with a letter
_FOREVER_S = 1e9


class EncryptedSocket:
    """A TLS connection, with those methods of a socket that Paceline uses."""

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

    def shake_hands(self, timeout_s: float) -> str:
        """Performs the TLS handshake; returns why it failed, or an empty string.

        Raises:
            OSError: the handshake did not complete within `timeout_s` seconds.
        """
        return self._core.shake_hands(timeout_s)

    def settimeout(self, timeout_s: float | None) -> None:
        """Sets the time-out of `sendall` and `recv` in seconds; None means no limit, and 0 means no waiting."""
        self._timeout_s = timeout_s

    def sendall(self, data: bytes | memoryview) -> None:
        """Sends `data`.

        Raises:
            OSError: the data was not sent in time, or the connection is broken.
        """
        self._core.send(bytes(data), self._limit_s())

    def recv(self, nbytes: int) -> bytes:
        """Returns received data, at most 16 KiB, or no bytes if the peer has closed the connection.

        Raises:
            OSError: no data was received in time, or the connection is broken.
        """
        return self._core.receive(nbytes, self._limit_s())

    def recv_into(self, memory: memoryview) -> int:
        """Receives data into the beginning of `memory`, as `recv` does; returns the number of bytes.

        Raises:
            OSError: no data was received in time, or the connection is broken.
        """
        data = self.recv(len(memory))
        memory[: len(data)] = data
        return len(data)

    def recv_now(self, nbytes: int) -> bytes:
        """Returns received data, as `recv` does, but without waiting.

        Raises:
            BlockingIOError: nothing has been received, or only a part of a record.
            OSError: the connection is broken.
        """
        try:
            return self._core.receive(nbytes, 0.0)
        except TimeoutError as error:
            raise BlockingIOError(str(error)) from None

    def release(self) -> _core.TlsConnection:
        """Returns the connection for the core, which becomes responsible for closing the socket."""
        self._plain.detach()
        return self._core

    def _limit_s(self) -> float:
        return _FOREVER_S if self._timeout_s is None else self._timeout_s


Connection = socket.socket | EncryptedSocket


@lru_cache(maxsize=4)
def identity_of(secret: bytes | None) -> _core.TlsIdentity:
    """Returns the certificate of the jobs with this secret.

    Raises:
        ValueError: this machine has no suitable OpenSSL; the message explains what to do.
    """
    try:
        return _core.TlsIdentity(derive_key(secret, "tls certificate"))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def is_between_machines(connection: Connection) -> bool:
    """Returns whether a connection may lead to another machine, that is, whether it is not a Unix socket."""
    return connection.family != socket.AF_UNIX


def encrypt_as_client(connection: socket.socket, secret: bytes | None, timeout_s: float) -> Connection:
    """Encrypts a new connection on the connecting side if its addresses and the level require it.

    Raises:
        AuthenticationError: the peer has another job's certificate, or does not use TLS.
        HandshakeUnfinishedError: the peer did not answer in time, or closed the connection.
        ValueError: this machine has no OpenSSL.
    """
    if not is_between_machines(connection) or not _is_due(connection):
        return connection
    encrypted = EncryptedSocket(connection, secret, accepts=False)
    try:
        why = encrypted.shake_hands(timeout_s)
    except OSError as error:
        raise interrupted_handshake(connection, error) from error
    if why:
        raise AuthenticationError(
            f"the process at {name_of(connection)} does not hold this job's secret ({why}); all ranks need the same "
            "PACELINE_SECRET, and the address must be this job's"
        )
    return encrypted


def encrypt_as_server(connection: socket.socket, secret: bytes | None, timeout_s: float) -> Connection:
    """Encrypts a new connection on the accepting side if the peer begins with TLS.

    Raises:
        AuthenticationError: the connection must be encrypted and is not, or the peer has another certificate.
        HandshakeUnfinishedError: the handshake did not begin, or complete, in time.
    """
    if not is_between_machines(connection):
        return connection
    deadline = time.monotonic() + timeout_s
    try:
        connection.settimeout(timeout_s)
        first = connection.recv(1, socket.MSG_PEEK)
        if first != _CLIENT_HELLO:
            if first and _is_due(connection):
                refuse_plain(connection, timeout_s)
            return connection
        encrypted = EncryptedSocket(connection, secret, accepts=True)
        why = encrypted.shake_hands(max(0.0, deadline - time.monotonic()))
    except OSError as error:
        raise interrupted_handshake(connection, error) from error
    except ValueError as error:  # no OpenSSL here
        raise AuthenticationError(f"{name_of(connection)} wants encryption: {error}") from error
    if why:
        raise AuthenticationError(f"{name_of(connection)} does not hold this job's certificate ({why})")
    return encrypted


def plain(connection: Connection) -> socket.socket:
    """Returns a connection within a machine as a plain socket."""
    assert isinstance(connection, socket.socket)
    return connection


def receive_now(connection: Connection, nbytes: int) -> bytes:
    """Returns received data from a connection that is readable.

    Raises:
        BlockingIOError: only a part of a record has been received.
        OSError: the connection is broken.
    """
    if isinstance(connection, EncryptedSocket):
        return connection.recv_now(nbytes)
    return connection.recv(nbytes)


def release_to_core(connection: Connection) -> int | _core.TlsConnection:
    """Returns a connection for the core, which becomes responsible for closing it."""
    return connection.release() if isinstance(connection, EncryptedSocket) else connection.detach()


def _is_due(connection: socket.socket) -> bool:
    return must_encrypt(connection.getsockname()[0], connection.getpeername()[0], chosen_level())
