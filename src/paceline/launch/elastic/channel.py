"""The launcher's end of the pair of sockets that leads to one worker: a message in each datagram."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable

from paceline.elastic.messages import LARGEST


class Channel:
    """Passes the worker's datagrams to `on_datagram`, and what it is told to the worker, in order.

    A worker that does not read delays nobody: what it cannot be sent now is kept until it can.
    """

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, on_datagram: Callable[[bytes], None]
    ) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._selector = selector
        self._on_datagram = on_datagram
        self._unsent: deque[bytes] = deque()
        self._is_open = True
        selector.register(connection, selectors.EVENT_READ, self._on_ready)

    @classmethod
    def pair(
        cls, selector: selectors.BaseSelector, on_datagram: Callable[[bytes], None]
    ) -> tuple[Channel, socket.socket]:
        """Returns a channel, and the worker's end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours, selector, on_datagram), theirs

    def send(self, datagram: bytes) -> None:
        """Sends a datagram, or keeps it until the worker reads; one to a worker that has ended is dropped."""
        self._unsent.append(datagram)
        self._flush()

    def drain(self) -> None:
        """Takes all that the worker has sent so far."""
        while self._is_open:
            try:
                datagram = self._connection.recv(LARGEST)
            except BlockingIOError:
                return
            except OSError:
                datagram = b""
            if not datagram:
                self.close()
                return
            self._on_datagram(datagram)

    def close(self) -> None:
        """Closes the channel; idempotent."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._connection)
            self._connection.close()

    def _on_ready(self) -> None:
        self._flush()
        self.drain()

    def _flush(self) -> None:
        while self._is_open and self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError:  # the worker has ended, which its launcher notices too
                self._unsent.clear()
                break
            self._unsent.popleft()
        if self._is_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            self._selector.modify(self._connection, events, self._on_ready)
