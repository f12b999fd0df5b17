"""Attempts unauthorized connections to listening processes."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from paceline.cli.doctor.security import ListeningSocket
from paceline.comm.security.handshake import PeerHello, prove
from paceline.comm.security.secret import derive_key
from paceline.errors import AuthenticationError

DEADLINE_S = 20.0  # the handshake's timeout is 5 s, but the machine may be busy


def connect_to(listener: ListeningSocket) -> socket.socket:
    if listener.kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(DEADLINE_S)
        path = listener.address
        connection.connect("\0" + path[1:] if path.startswith("@") else path)
        return connection
    return socket.create_connection((listener.address, listener.port), DEADLINE_S)


def _without_secret(connection: socket.socket) -> None:
    prove(connection, derive_key(None, "store"), PeerHello("store"))


def _with_wrong_secret(connection: socket.socket) -> None:
    prove(connection, derive_key(b"x" * 32, "node"), PeerHello("node"))


def _plain_bytes(connection: socket.socket) -> None:
    connection.sendall(b"GET /get?key=default_pg HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(200))
    _expect_the_end(connection)


def _tls_without_certificate(connection: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(connection) as over:
        over.sendall(b"x" * 200)
        _expect_the_end(over)


def _expect_the_end(connection: socket.socket) -> None:
    if data := connection.recv(4096):
        raise AssertionError(f"it answered a stranger: {data!r}")
    raise ConnectionResetError("it hung up")


ATTEMPTS: tuple[Callable[[socket.socket], None], ...] = (
    _without_secret,
    _with_wrong_secret,
    _plain_bytes,
    _tls_without_certificate,
)


def try_each_way(listener: ListeningSocket) -> dict[str, str]:
    """Makes each kind of connection attempt; returns the rejections. An accepted attempt is an error."""

    def attempt(way: Callable[[socket.socket], None]) -> tuple[str, str]:
        with connect_to(listener) as connection:
            try:
                way(connection)
            except TimeoutError:
                raise AssertionError(f"{listener} let {way.__name__} wait for {DEADLINE_S} s") from None
            except (AuthenticationError, OSError) as error:
                return way.__name__, str(error)
        raise AssertionError(f"{listener} let {way.__name__} in")

    with ThreadPoolExecutor(len(ATTEMPTS)) as threads:
        return dict(threads.map(attempt, ATTEMPTS))
