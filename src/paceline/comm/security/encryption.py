"""Encrypts connections between machines: TLS 1.3, in the core, with a certificate that the job's secret determines.

The connecting side begins with TLS or without; the accepting side sees which it is by the first byte, takes both, and
refuses a connection that ought to be encrypted and is not. Inside, the handshake that proves the secret runs as it does
on every connection.
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

_CLIENT_HELLO = b"\x16"  # the type of TLS's first record; Paceline's own handshake begins with a letter
_FOREVER_S = 1e9


class EncryptedSocket:
    """A connection that TLS encrypts, with the methods of a socket that Paceline uses."""

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
        """Performs TLS's handshake; returns why it failed, or an empty string.

        Raises:
            OSError: it did not end within `timeout_s`.
        """
        return self._core.shake_hands(timeout_s)

    def settimeout(self, timeout_s: float | None) -> None:
        """Sets how long `sendall` and `recv` wait; None for ever, and 0 not at all."""
        self._timeout_s = timeout_s

    def sendall(self, data: bytes | memoryview) -> None:
        """Sends `data`.

        Raises:
            OSError: it was not taken in time, or the connection is broken.
        """
        self._core.send(bytes(data), self._limit_s())

    def recv(self, nbytes: int) -> bytes:
        """Returns what has come, at most 16 KiB; nothing if the other end has closed the connection.

        Raises:
            OSError: nothing came in time, or the connection is broken.
        """
        return self._core.receive(nbytes, self._limit_s())

    def recv_into(self, memory: memoryview) -> int:
        """Writes what has come, as `recv`, to the beginning of `memory`; returns the number of bytes.

        Raises:
            OSError: nothing came in time, or the connection is broken.
        """
        data = self.recv(len(memory))
        memory[: len(data)] = data
        return len(data)

    def recv_now(self, nbytes: int) -> bytes:
        """Returns what has come, as `recv`, but does not wait.

        Raises:
            BlockingIOError: nothing has come, or only a part of a record.
            OSError: the connection is broken.
        """
        try:
            return self._core.receive(nbytes, 0.0)
        except TimeoutError as error:
            raise BlockingIOError(str(error)) from None

    def release(self) -> _core.TlsConnection:
        """Returns the connection for the core, which closes the socket from now on."""
        self._plain.detach()
        return self._core

    def _limit_s(self) -> float:
        return _FOREVER_S if self._timeout_s is None else self._timeout_s


Connection = socket.socket | EncryptedSocket


@lru_cache(maxsize=4)
def identity_of(secret: bytes | None) -> _core.TlsIdentity:
    """Returns the certificate of the jobs with this secret.

    Raises:
        ValueError: this machine has no OpenSSL, or one that cannot do it; the message says what to do.
    """
    try:
        return _core.TlsIdentity(derive_key(secret, "tls certificate"))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def is_between_machines(connection: Connection) -> bool:
    """Returns whether a connection could lead to another machine: it is no Unix socket."""
    return connection.family != socket.AF_UNIX


def encrypt_as_client(connection: socket.socket, secret: bytes | None, timeout_s: float) -> Connection:
    """Encrypts a new connection on the connecting side if its addresses and the level require it.

    Raises:
        AuthenticationError: the other end shows another job's certificate, or speaks no TLS.
        HandshakeUnfinishedError: it did not answer in time, or closed the connection.
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
    """Encrypts a new connection on the accepting side if the other end begins so.

    Raises:
        AuthenticationError: the connection must be encrypted and is not, or the other end shows another certificate.
        HandshakeUnfinishedError: it did not begin, or finish, in time.
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
    """Returns a connection within a machine as the socket that it is."""
    assert isinstance(connection, socket.socket)
    return connection


def receive_now(connection: Connection, nbytes: int) -> bytes:
    """Returns what has come on a connection that is readable.

    Raises:
        BlockingIOError: it is only a part of a record.
        OSError: the connection is broken.
    """
    if isinstance(connection, EncryptedSocket):
        return connection.recv_now(nbytes)
    return connection.recv(nbytes)


def release_to_core(connection: Connection) -> int | _core.TlsConnection:
    """Hands over a connection to the core, which closes it from now on."""
    return connection.release() if isinstance(connection, EncryptedSocket) else connection.detach()


def _is_due(connection: socket.socket) -> bool:
    return must_encrypt(connection.getsockname()[0], connection.getpeername()[0], chosen_level())
