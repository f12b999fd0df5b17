"""Captures all packets on an interface of this host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

_ALL_PROTOCOLS = 0x0003
_LARGEST = 1 << 17
_QUEUE = 64 << 20


class Capture:
    """Captures packets until `close`. It must be created inside the host's namespace."""

    def __init__(self, interface: str = "eth0") -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _QUEUE)
        self._socket.bind((interface, _ALL_PROTOCOLS))
        self._socket.settimeout(0.05)
        self._frames: list[bytes] = []
        self._over = False
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        while True:
            try:
                self._frames.append(self._socket.recv(_LARGEST))
            except TimeoutError:
                if self._over:
                    return

    def close(self) -> None:
        """Reads the remaining packets, and stops."""
        self._over = True
        self._thread.join()
        self._socket.close()

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._frames))

    def seen(self, words: Sequence[bytes]) -> list[str]:
        """Returns the elements of `words` that occur in a captured frame."""
        return [word.decode() for word in words if any(word in frame for frame in self._frames)]

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
