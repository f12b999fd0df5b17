"""Client of a store served by another process or by another thread in this process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from paceline import _core
from paceline.comm.security.encryption import Connection, release_to_core
from paceline.comm.security.handshake import HandshakeUnfinishedError, connect_with_secret
from paceline.comm.store.store import DEFAULT_TIMEOUT, Store, StoreAnswer, StoreOp, StoreStatus
from paceline.durations import Timeout, socket_timeout_s, to_seconds
from paceline.errors import StoreConnectionError
from paceline.linux import is_out_of_descriptors

CHANNEL = "store"

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_UNFINISHED_FOR_S = 20.0  # a busy server completes a handshake late, and another program never completes it
_GRACE_S = 10.0  # time for the server's answer, in addition to a request's own waiting time

_STATUS = tuple(StoreStatus)
_ANSWERED, _CLOSED, _LOST = 0, 1, 4  # results of a request (native/store/client.hpp)


class StoreServerLostError(StoreConnectionError):
    """The connection broke without a closing message, since the server's process died or the network is down."""


class RemoteStore(Store):
    """Client of a store that another thread or process serves.

    A thread that waits for a key occupies a connection, and other threads open additional ones with `open_connection`,
    which retries as long as the function that it is given returns True. The client never reopens a connection that the
    server has closed.
    """

    def __init__(
        self, open_connection: Callable[[Callable[[], bool]], Connection], name: str, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        super().__init__(timeout)
        self._name = name
        self._open_connection = open_connection
        self._owner = os.getpid()
        self._clients: list[_core.StoreClient] = []
        self._idle: list[_core.StoreClient] = []
        self._closed = False
        self._idle.append(self._connected())

    def __repr__(self) -> str:
        return self._name

    def close(self) -> None:
        """Closes the connections and thereby wakes waiting threads; idempotent."""
        self._closed = True
        if os.getpid() != self._owner:  # a forked child must not close its parent's connections
            return
        for client in tuple(self._clients):
            client.close()

    def _connected(self) -> _core.StoreClient:
        client = _core.StoreClient(release_to_core(self._open_connection(lambda: not self._closed)))
        self._clients.append(client)
        if self._closed:  # another thread called `close` in the meantime
            client.close()
        return client

    def _apply(self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float) -> StoreAnswer:
        if os.getpid() != self._owner:
            raise StoreConnectionError(
                f"{self} was opened by process {self._owner} and cannot be used by its forked child {os.getpid()}; "
                "open a store of the child's own"
            )
        if self._closed:
            raise StoreConnectionError(f"{self} was closed by this process ({self._owner}) before {op.name.lower()}")
        if op is StoreOp.LAST_WILL:  # a will belongs to a connection, so all wills use the same one
            result, status, answer, values = self._clients[0].call(op, number, fields, timeout_s + _GRACE_S)
        else:
            result, status, answer, values = self._request_on_idle(op, number, fields, timeout_s + _GRACE_S)
        if result == _ANSWERED:
            return _STATUS[status], answer, values
        if result == _LOST:
            raise StoreServerLostError(
                f"{self} lost its server in {op.name.lower()}: the process that served it has died, or the connection "
                "to it was lost"
            )
        if result == _CLOSED:
            raise StoreConnectionError(
                f"{self} closed the connection (seen in {op.name.lower()}); the process that serves it has ended"
            )
        raise StoreConnectionError(
            f"{self} did not answer {op.name.lower()} within {timeout_s + _GRACE_S:.0f} s; its process is stopped, or "
            "the network to it is down"
        )

    def _request_on_idle(
        self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float
    ) -> tuple[int, int, int, list[bytes]]:
        try:
            client = self._idle.pop()
        except IndexError:
            client = self._connected()
        try:
            return client.call(op, number, fields, timeout_s)
        finally:
            self._idle.append(client)


def connect(
    dial: Callable[[float], socket.socket],
    place: str,
    secret: bytes | None,
    timeout: Timeout,
    is_wanted: Callable[[], bool],
) -> Connection:
    """Connects until the server answers or `timeout` expires; returns the authenticated connection.

    Args:
        dial: a function that connects a socket within the given number of seconds.
        place: the server's address, for error messages.
        is_wanted: a function that returns False once this process has closed the store.

    Raises:
        StoreConnectionError: no server answered, or the connection is no longer wanted.
        AuthenticationError: the server belongs to another job, or is not a Paceline process.
    """
    started = time.monotonic()
    deadline = started + to_seconds(timeout)
    unfinished_since: float | None = None
    pause_s = _FIRST_PAUSE_S
    attempts = 0
    while True:
        attempts += 1
        try:
            return connect_with_secret(dial(socket_timeout_s(deadline - time.monotonic())), secret, CHANNEL)
        except (OSError, HandshakeUnfinishedError) as error:
            if is_out_of_descriptors(error):
                raise  # a retry would fail as well
            if not is_wanted():
                raise StoreConnectionError(
                    f"this process ({os.getpid()}) closed the store at {place} while one of its threads connected to "
                    f"it; the last of {attempts} attempts failed with: {error}"
                ) from error
            now = time.monotonic()
            if isinstance(error, HandshakeUnfinishedError):
                unfinished_since = now if unfinished_since is None else unfinished_since
                if now >= min(deadline, unfinished_since + _UNFINISHED_FOR_S):
                    raise
            elif now >= deadline:
                raise StoreConnectionError(
                    f"no store responded at {place} after {now - started:.1f} s and {attempts} attempts; the last "
                    f"error was: {error}. Check that rank 0 (or the launcher) is running, that the address and port "
                    "are the same on every rank, and that no firewall blocks the connection"
                ) from error
            time.sleep(max(0.0, min(pause_s, deadline - now)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def connect_unix(path: str, secret: bytes | None, timeout: Timeout = DEFAULT_TIMEOUT) -> RemoteStore:
    """Connects to the store that a launcher serves at the Unix socket `path`."""

    def dial(timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return connection

    place = f"unix:{path}"
    return RemoteStore(
        lambda is_wanted: connect(dial, place, secret, timeout, is_wanted), f"the store at {place}", timeout
    )
