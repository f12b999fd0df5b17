"""Listens for the store's clients and hands those that hold the job's secret to the core's server."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

from paceline import _core
from paceline.errors import AuthenticationError
from paceline.security.handshake import verify
from paceline.security.secret import derive_key

CHANNEL = "store"
_MAX_HANDSHAKES = 128
_PAUSE_S = 0.05  # when the system cannot give a connection, e.g. for want of descriptors

_log = logging.getLogger(__name__)


class StoreServer:
    """Serves a store on `listener`, a listening socket, which it takes over.

    The interpreter takes part in a connection's handshake only; requests are served by a thread of the core.
    Connections that have not proved the secret are few and short-lived: one more than the limit ends the oldest, so
    that those who hold connections open without a word keep nobody out.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._listener = listener
        self._listener.setblocking(True)
        self._key = derive_key(secret, CHANNEL)
        self._core = _core.StoreServer()
        self._handshakes: dict[int, socket.socket] = {}  # by the order of their coming
        self._changing = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        threading.Thread(target=self._accept, name="paceline-accept", daemon=True).start()

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
        with self._changing:
            for connection in self._handshakes.values():
                _end(connection)
        self._core.close()

    def _accept(self) -> None:
        number = 0
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_PAUSE_S)
                continue
            number += 1
            with self._changing:
                if len(self._handshakes) >= _MAX_HANDSHAKES:
                    _end(self._handshakes.pop(next(iter(self._handshakes))))
                self._handshakes[number] = connection
            try:
                threading.Thread(target=self._admit, args=(number, connection), daemon=True).start()
            except RuntimeError:  # the system gives no more threads
                self._leave(number)
                connection.close()

    def _admit(self, number: int, connection: socket.socket) -> None:
        try:
            verify(connection, self._key, CHANNEL)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._leave(number):
                self._core.adopt(connection.detach())
        except (AuthenticationError, OSError) as error:
            _log.warning("the store refused a connection: %s", error)
        finally:
            self._leave(number)
            connection.close()

    def _leave(self, number: int) -> bool:
        with self._changing:
            return self._handshakes.pop(number, None) is not None


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # its own thread closes it
