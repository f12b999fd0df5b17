"""CacheServer: serves a launcher's cache to local workers over a Unix socket, and to other machines over TCP."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from typing import TYPE_CHECKING

from paceline.comm.security.authenticated_listener import AuthenticatedListener, ListeningEndpoint
from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import PeerHello
from paceline.comm.security.secret import derive_key
from paceline.comm.store.tcp_store import listen

if TYPE_CHECKING:
    from paceline.train.checkpoint.peer_memory.cache import CheckpointCache

VARIABLE = "PACELINE_COPIES"
_CHANNEL = "copies"  # equals `protocol.CHANNEL`; `protocol.py` is imported only when a worker connects

# If a worker's machine is lost, the cache drops the worker's unfinished files after half a minute instead of two hours.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class CacheServer:
    """The cache and the listeners of a launcher. Each generation of workers gets new listeners, but the memory is kept.

    `address` is None if there are no other machines.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._identity = secrets.token_hex(8)
        self._cache: CheckpointCache | None = None
        self._secret: bytes | None = None
        self._listeners: list[AuthenticatedListener] = []
        self._tcp_address = ""
        self._connections: set[Connection] = set()
        self._changing = threading.Lock()

    def open(self, path: str, secret: bytes | None) -> str:
        """Accepts workers on a Unix socket at `path`; returns the value of PACELINE_COPIES for them."""
        self._secret = secret
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        self._add_listener(listener)
        return f"unix:{path}"

    def shut(self) -> None:
        """Closes all connections and listeners, but keeps the memory. Idempotent."""
        with self._changing:
            listeners, self._listeners, self._tcp_address = self._listeners, [], ""
            connections, self._connections = self._connections, set()
        for listener in listeners:
            listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the connection's own thread closes it

    def close(self) -> None:
        """Closes all connections and frees the memory. Idempotent."""
        self.shut()
        if self._cache is not None:
            self._cache.close()

    def _add_listener(self, listener: ListeningEndpoint) -> None:
        key = derive_key(self._secret, _CHANNEL)
        self._listeners.append(AuthenticatedListener(listener, key, _CHANNEL, self._admit, secret=self._secret))

    def _listen(self) -> str:
        """Returns the address at which other machines reach the cache, or "" if there are no other machines."""
        with self._changing:
            if not self._tcp_address and self._address is not None and self._listeners:
                self._add_listener(listen(self._address, 0, self._secret))
                host, port = self._address, self._listeners[-1].port
                self._tcp_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return self._tcp_address

    def _admit(self, connection: Connection, _: PeerHello) -> None:
        """Serves a worker on the calling thread, at low priority."""
        from paceline.train.checkpoint.peer_memory.cache import CheckpointCache, Session
        from paceline.train.elastic.process_priority import lower_thread_priority

        lower_thread_priority()
        if connection.family != socket.AF_UNIX:
            for level, option, value in _KEEPALIVE:
                connection.setsockopt(level, option, value)
        with self._changing:
            if not self._listeners:  # `shut` was called in the meantime
                connection.close()
                return
            self._connections.add(connection)
            cache = self._cache = self._cache or CheckpointCache()
        try:
            Session(connection, cache, self._identity, self._listen).run()
        finally:
            with self._changing:
                self._connections.discard(connection)
            connection.close()
