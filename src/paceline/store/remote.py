"""A store that another process (or another thread of this one) serves."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from paceline import _core
from paceline.errors import StoreConnectionError
from paceline.security.handshake import Hello, prove
from paceline.security.secret import derive_key
from paceline.store.base import DEFAULT_TIMEOUT, Answer, Op, Status, Store
from paceline.store.server import CHANNEL

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_GRACE_S = 10.0  # beyond a request's own waiting time, for the server to answer


_STATUS = tuple(Status)
_ANSWERED, _CLOSED = 0, 1  # how an exchange with the server ended (native/bindings/store.cpp)


class RemoteStore(Store):
    """The client's side of a served store, over `connection`, which it takes over."""

    def __init__(self, connection: socket.socket, name: str, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._name = name
        self._ask_server = _core.StoreClient(connection.detach())
        self._owner = os.getpid()

    def __repr__(self) -> str:
        return self._name

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self._ask_server.close()

    def _apply(self, op: Op, number: int, fields: list[bytes], timeout_s: float) -> Answer:
        if os.getpid() != self._owner:
            raise StoreConnectionError(
                f"{self} was opened by process {self._owner} and cannot be used by its forked child {os.getpid()}; "
                "open a store of the child's own"
            )
        result, status, answer, values = self._ask_server.ask(op, number, fields, timeout_s + _GRACE_S)
        if result == _ANSWERED:
            return _STATUS[status], answer, values
        if result == _CLOSED:
            raise StoreConnectionError(
                f"{self} closed the connection (seen in {op.name.lower()}); the process that serves it has ended"
            )
        raise StoreConnectionError(
            f"{self} did not answer {op.name.lower()} within {timeout_s + _GRACE_S:.0f} s; "
            "its process is stopped or the network to it is cut"
        )


def connect(
    dial: Callable[[float], socket.socket], place: str, secret: bytes | None, timeout: timedelta
) -> socket.socket:
    """Dials until the server answers or `timeout` is over; the connection, authenticated.

    Raises:
        StoreConnectionError: names the place, the time, the number of attempts and the last error.
        AuthenticationError: the server is not of this job.
    """
    started = time.monotonic()
    deadline = started + timeout.total_seconds()
    pause_s = _FIRST_PAUSE_S
    attempts = 0
    while True:
        attempts += 1
        try:
            connection = dial(max(0.1, deadline - time.monotonic()))
        except OSError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                elapsed = time.monotonic() - started
                raise StoreConnectionError(
                    f"no store at {place} after {elapsed:.1f} s and {attempts} attempts; the last said: {error}. "
                    "Check that rank 0 (or the launcher) runs, that the address and port are the same on every rank, "
                    "and that no firewall is between"
                ) from error
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            continue
        try:
            prove(connection, derive_key(secret, CHANNEL), Hello(CHANNEL))
        except BaseException:
            connection.close()
            raise
        return connection


def connect_unix(path: str, secret: bytes | None, timeout: timedelta = DEFAULT_TIMEOUT) -> RemoteStore:
    """The store that a launcher serves at the Unix socket `path`."""

    def dial(timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return connection

    return RemoteStore(connect(dial, f"unix:{path}", secret, timeout), f"the store at unix:{path}", timeout)
