"""Listens for the store's clients and hands those that hold the job's secret to the core's server."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading

from paceline import _core
from paceline.errors import AuthenticationError
from paceline.security.handshake import verify
from paceline.security.secret import derive_key

CHANNEL = "store"
_MAX_HANDSHAKES = 256

_log = logging.getLogger(__name__)


class StoreServer:
    """Serves a store on `listener`, a listening socket, which it takes over.

    The interpreter takes part in a connection's handshake only; requests are served by a thread of the core.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._listener = listener
        self._listener.setblocking(True)
        self._key = derive_key(secret, CHANNEL)
        self._core = _core.StoreServer()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._owner = os.getpid()
        self._closed = False
        threading.Thread(target=self._accept, name="paceline-accept", daemon=True).start()

    @classmethod
    def on_unix_path(cls, path: str, secret: bytes | None) -> StoreServer:
        """Serves on a Unix socket at `path`, whose directory should be its owner's alone."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1024)
        return cls(listener, secret)

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Closes the listener and every connection; idempotent, and without effect in a forked child."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        self._core.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            verify(connection, self._key, CHANNEL)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._core.adopt(connection.detach())
        except AuthenticationError as error:
            _log.warning("the store refused a connection: %s", error)
        finally:
            connection.close()
            self._handshakes.release()
