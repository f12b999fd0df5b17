"""Serves a launcher's vault: to its own workers by a Unix socket, and to those of other machines once one has asked."""

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
_CHANNEL = "copies"  # that of `messages.py`, which is imported when the first worker comes

# Half a minute after a worker's machine was lost, what it had not finished goes, instead of after two hours.
_NOTICES_LOSS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class CacheServer:
    """The vault of a launcher, and its doors; the memory outlives the doors, which each generation of workers has.

    Args:
        address: by which other machines know this one; None if the job has no other.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._identity = secrets.token_hex(8)
        self._vault: CheckpointCache | None = None
        self._secret: bytes | None = None
        self._doors: list[AuthenticatedListener] = []
        self._listens = ""
        self._connections: set[Connection] = set()
        self._changing = threading.Lock()

    def open(self, path: str, secret: bytes | None) -> str:
        """Lets workers come by a Unix socket at `path`; returns the value of PACELINE_COPIES for them."""
        self._secret = secret
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        self._add_door(listener)
        return f"unix:{path}"

    def shut(self) -> None:
        """Ends all connections and lets nobody come; what is held stays. It is idempotent."""
        with self._changing:
            doors, self._doors, self._listens = self._doors, [], ""
            connections, self._connections = self._connections, set()
        for door in doors:
            door.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def close(self) -> None:
        """Shuts the doors and gives the memory back; idempotent."""
        self.shut()
        if self._vault is not None:
            self._vault.close()

    def _add_door(self, listener: ListeningEndpoint) -> None:
        key = derive_key(self._secret, _CHANNEL)
        self._doors.append(AuthenticatedListener(listener, key, _CHANNEL, self._admit, secret=self._secret))

    def _listen(self) -> str:
        """Returns where other machines reach the vault; empty if there are none."""
        with self._changing:
            if not self._listens and self._address is not None and self._doors:
                self._add_door(listen(self._address, 0, self._secret))
                host, port = self._address, self._doors[-1].port
                self._listens = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return self._listens

    def _admit(self, connection: Connection, _: PeerHello) -> None:
        """Serves a worker in the thread that this is called in, at a low priority."""
        from paceline.train.checkpoint.peer_memory.cache import CheckpointCache, Session
        from paceline.train.elastic.process_priority import lower_thread_priority

        lower_thread_priority()
        if connection.family != socket.AF_UNIX:
            for level, option, value in _NOTICES_LOSS:
                connection.setsockopt(level, option, value)
        with self._changing:
            if not self._doors:  # shut meanwhile
                connection.close()
                return
            self._connections.add(connection)
            vault = self._vault = self._vault or CheckpointCache()
        try:
            Session(connection, vault, self._identity, self._listen).run()
        finally:
            with self._changing:
                self._connections.discard(connection)
            connection.close()
