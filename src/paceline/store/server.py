"""Listens for the store's clients and hands those that prove the job's secret to the core's server."""

from __future__ import annotations

import os
import socket

from paceline import _core
from paceline.security.doorkeeper import Doorkeeper, Listener
from paceline.security.encryption import Connection, for_core
from paceline.security.handshake import Hello
from paceline.security.secret import derive_key
from paceline.store.remote import CHANNEL


class StoreServer:
    """Serves a store on `listener`, a listening socket, which it takes over.

    Python code runs for a connection's handshake only; a thread of the core serves the requests.
    """

    def __init__(self, listener: Listener, secret: bytes | None) -> None:
        self._core = _core.StoreServer()
        self._owner = os.getpid()
        self._doorkeeper = Doorkeeper(listener, derive_key(secret, CHANNEL), CHANNEL, self._admit, secret=secret)

    @classmethod
    def on_unix_path(cls, path: str, secret: bytes | None) -> StoreServer:
        """Serves on a Unix socket at `path`, whose directory should be its owner's alone."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(1024)
            return cls(listener, secret)
        except BaseException:
            listener.close()
            raise

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return self._doorkeeper.port

    def close(self) -> None:
        """Closes the listener and every connection; idempotent, and without effect in a forked child."""
        self._doorkeeper.close()
        if os.getpid() == self._owner:
            self._core.close()

    def _admit(self, connection: Connection, _hello: Hello) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._core.adopt(for_core(connection))
