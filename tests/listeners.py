"""Finds the sockets on which processes listen, and tries to get in."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import AuthenticationError
from paceline.security.handshake import Hello, prove
from paceline.security.secret import derive_key

_LISTENS = "0A"
_UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON
DEADLINE_S = 6.0  # of the handshake, and a second more


@dataclass(frozen=True)
class Listener:
    """`kind` is tcp, tcp6, udp, udp6 or unix; a Unix socket's address is its path, with @ for the abstract ones."""

    kind: str
    address: str
    port: int = 0

    def connect(self) -> socket.socket:
        if self.kind == "unix":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(DEADLINE_S)
            connection.connect("\0" + self.address[1:] if self.address.startswith("@") else self.address)
            return connection
        return socket.create_connection((self.address, self.port), DEADLINE_S)


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """Every socket of these processes on which strangers can be heard; those of UDP as soon as they are bound."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            inodes = {os.readlink(fd)[8:-1] for fd in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(fd)}
            for kind in ("tcp", "tcp6", "udp", "udp6"):
                for row in _rows(pid, kind):
                    if row[9] in inodes and (row[3] == _LISTENS or kind.startswith("udp")):
                        address, _, port = row[1].rpartition(":")
                        found.add(Listener(kind, _numeric(address), int(port, 16)))
            for row in _rows(pid, "unix"):
                if row[6] in inodes and int(row[3], 16) & _UNIX_LISTENS:
                    found.add(Listener("unix", row[7] if len(row) > 7 else ""))
    return found


def _is_socket(fd: Path) -> bool:
    try:
        return os.readlink(fd).startswith("socket:")
    except OSError:
        return False


def _rows(pid: int, kind: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]


def _numeric(packed: str) -> str:
    words = [int(packed[at : at + 8], 16) for at in range(0, len(packed), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _without_secret(connection: socket.socket) -> None:
    prove(connection, derive_key(None, "store"), Hello("store"))


def _with_wrong_secret(connection: socket.socket) -> None:
    prove(connection, derive_key(b"x" * 32, "node"), Hello("node"))


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


def try_each_way(listener: Listener) -> dict[str, str]:
    """Tries to get in in every way; returns how each was refused, by its name. One that gets in is an error."""

    def attempt(way: Callable[[socket.socket], None]) -> tuple[str, str]:
        with listener.connect() as connection:
            try:
                way(connection)
            except TimeoutError:
                raise AssertionError(f"{listener} let {way.__name__} wait for {DEADLINE_S} s") from None
            except (AuthenticationError, OSError) as error:
                return way.__name__, str(error)
        raise AssertionError(f"{listener} let {way.__name__} in")

    with ThreadPoolExecutor(len(ATTEMPTS)) as threads:
        return dict(threads.map(attempt, ATTEMPTS))
