"""Serves the meeting: carries reports to the state machine, its orders to the nodes, and notices who falls silent."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from paceline.launch.nodes.framing import Inbox, MessageError, encode
from paceline.launch.nodes.messages import Alive, AskTime, Dropped, Report, TellTime
from paceline.launch.nodes.steering import Orders, Steering
from paceline.security.doorkeeper import Doorkeeper
from paceline.security.encryption import Connection, receive_now
from paceline.security.handshake import Hello
from paceline.security.secret import derive_key

CHANNEL = "node"
HEARTBEAT_S = 0.5
_SEND_S = 1.0
_STALL_S = 1.0  # after a pause of this process as long as this, silence says nothing about the others
_LARGEST_READ = 1 << 16


@dataclass
class _Node:
    name: str
    connection: Connection
    heard_s: float
    inbox: Inbox = field(default_factory=Inbox)


class MeetingServer:
    """Serves on `listener`, a listening socket, which it takes over, in a thread of its own until `close`."""

    def __init__(self, listener: socket.socket, secret: bytes | None, steering: Steering, silence_s: float) -> None:
        self._steering = steering
        self._silence_s = silence_s
        self._nodes: dict[str, _Node] = {}
        self._came: list[Connection] = []
        self._count = 0
        self._closing_by_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._waiting, self._waking = os.pipe()
        self._selector.register(self._waiting, selectors.EVENT_READ)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        key = derive_key(secret, CHANNEL)
        self._doorkeeper = Doorkeeper(listener, key, CHANNEL, self._admit, secret=secret)
        self._thread = threading.Thread(target=self._serve, name="paceline-meeting", daemon=True)
        self._thread.start()

    def close(self, linger_s: float = 2.0) -> None:
        """Waits for the nodes to disconnect, `linger_s` seconds at most; idempotent."""
        if self._closing_by_s is None:
            self._closing_by_s = time.monotonic() + linger_s
            os.write(self._waking, b".")
            self._thread.join()
            self._doorkeeper.close()
            self._selector.close()
            os.close(self._waiting)
            os.close(self._waking)

    def wake(self) -> None:
        """Asks the state machine again what is due, since it was told something from elsewhere."""
        with contextlib.suppress(OSError):  # closed meanwhile
            os.write(self._waking, b".")

    def _admit(self, connection: Connection, _: Hello) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_S)
        self._came.append(connection)
        self.wake()

    def _serve(self) -> None:
        next_beat_s = 0.0
        while self._closing_by_s is None or (self._nodes and time.monotonic() < self._closing_by_s):
            now_s = time.monotonic()
            if now_s - next_beat_s > _STALL_S:
                for node in self._nodes.values():
                    node.heard_s = max(node.heard_s, now_s)
            if now_s >= next_beat_s:
                next_beat_s = now_s + HEARTBEAT_S
                self._beat()
            until_s = min(next_beat_s, self._steering.deadline_s or next_beat_s)
            for key, _ in self._selector.select(max(0.0, until_s - now_s)):
                if key.data is None:
                    self._welcome()
                else:
                    self._hear(key.data)
            self._find_the_silent()
            self._carry(self._steering.tick(time.monotonic()))
        for node in list(self._nodes.values()):
            node.connection.close()

    def _welcome(self) -> None:
        os.read(self._waiting, 4096)
        while self._came:
            connection = self._came.pop(0)
            self._count += 1
            node = _Node(f"node-{self._count}", connection, time.monotonic())
            self._nodes[node.name] = node
            self._selector.register(connection, selectors.EVENT_READ, node)

    def _hear(self, node: _Node) -> None:
        if node.name not in self._nodes:
            return
        try:
            data = receive_now(node.connection, _LARGEST_READ)
            messages = node.inbox.feed(data)
        except BlockingIOError:  # only a part of a record has come
            return
        except (OSError, MessageError) as error:
            self._drop(node, str(error))
            return
        if not data:
            self._drop(node, "its launcher has ended", has_ended=True)
            return
        node.heard_s = time.monotonic()
        for message in messages:
            if isinstance(message, AskTime):
                self._send(node, encode(TellTime(message.asked_ns, time.monotonic_ns())))
            elif isinstance(message, Report):
                self._carry(self._steering.reported(node.name, message, node.heard_s))

    def _beat(self) -> None:
        for node in list(self._nodes.values()):
            self._send(node, encode(Alive()))

    def _find_the_silent(self) -> None:
        now_s = time.monotonic()
        for node in list(self._nodes.values()):
            if now_s - node.heard_s > self._silence_s:
                silent_s = now_s - node.heard_s
                self._drop(node, f"nothing was heard of it for {silent_s:.1f} s", silent_s=silent_s)

    def _carry(self, orders: Orders) -> None:
        for name, order in orders:
            if name not in self._nodes:
                continue
            if isinstance(order, Dropped):
                self._part(self._nodes.pop(name))
            else:
                self._send(self._nodes[name], encode(order))

    def _send(self, node: _Node, data: bytes) -> None:
        try:
            node.connection.sendall(data)
        except OSError as error:
            self._drop(node, str(error))

    def _drop(self, node: _Node, why: str, has_ended: bool = False, silent_s: float = 0.0) -> None:
        if self._nodes.pop(node.name, None) is None:
            return
        self._part(node)
        now_s = time.monotonic()
        if has_ended:
            self._carry(self._steering.ended(node.name, why, now_s))
        else:
            self._carry(self._steering.lost(node.name, why, now_s, silent_s))

    def _part(self, node: _Node) -> None:
        """Closes a connection; the other side, if it lives, must not take that for the end of this launcher."""
        with contextlib.suppress(OSError):
            node.connection.sendall(encode(Dropped()))
        self._selector.unregister(node.connection)
        node.connection.close()
