"""`RendezvousServer`: forwards reports from nodes to the controller and orders back to nodes, and detects lost nodes.

A launcher that is merely starved of CPU time is not considered lost (`is_starved`). If all cores are busy, a launcher
may be unable to run for several seconds. Its machine's kernel still acknowledges data, unlike the kernel of a lost or
disconnected machine.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.comm.security.authenticated_listener import AuthenticatedListener, ListeningEndpoint
from paceline.comm.security.encryption import Connection, receive_now
from paceline.comm.security.handshake import PeerHello
from paceline.comm.security.secret import derive_key
from paceline.operate.launch.multinode.membership import JobController, Orders
from paceline.operate.launch.multinode.protocol import (
    Heartbeat,
    Inbox,
    MessageError,
    NodeDropped,
    Order,
    Report,
    TimeRequest,
    TimeResponse,
    encode,
)

STARVATION_LIMIT_S = 30.0  # maximum silence of a launcher whose machine responds

_INFO = struct.Struct("=2xB53xI")  # fields of `struct tcp_info` in linux/tcp.h: tcpi_retransmits, tcpi_last_ack_recv
_FEWEST_REPEATED = 2  # a single retransmission may coincide with a late acknowledgment


def is_starved(connection: Connection, silent_s: float, within_s: float) -> bool:
    """Returns True if the other launcher, silent for `silent_s` seconds, may merely be starved of CPU time.

    A reachable machine's kernel acknowledges data within `within_s` seconds. Data must be sent on the connection
    several times in each such period.
    """
    if silent_s >= STARVATION_LIMIT_S:
        return False
    try:
        repeated, last_answer_ms = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except (OSError, struct.error):
        return False
    return bool(repeated < _FEWEST_REPEATED or last_answer_ms * 1e-3 <= within_s)


CHANNEL = "node"
HEARTBEAT_S = 0.5
_SEND_S = 1.0
_STALL_S = 1.0  # if this process itself was paused for this long, silent nodes are not considered lost
_LONGEST_TURN_S = 30.0  # heartbeats stop if the serving thread is busy for longer
_LARGEST_READ = 1 << 16


@dataclass
class _Node:
    """A connected node, to which two threads send. `fault` is the reason why sending failed, or ""."""

    name: str
    connection: Connection
    last_received_s: float
    inbox: Inbox = field(default_factory=Inbox)
    fault: str = ""
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the node and the server are on different machines."""
        try:
            return bool(self.connection.getpeername()[0] != self.connection.getsockname()[0])
        except OSError:  # the connection was reset
            return False

    def send(self, message: Order) -> None:
        with self._sending:
            if not self.fault:
                try:
                    self.connection.sendall(encode(message))
                except OSError as error:
                    self.fault = str(error)

    def part(self) -> None:
        """Closes the connection so that the node does not consider this launcher to have exited."""
        self.send(NodeDropped())
        self.close()

    def close(self) -> None:
        """Closes the connection once no thread is sending."""
        with self._sending:
            self.fault = self.fault or "the connection was closed"
            self.connection.close()


def explain_silence(silent_s: float, elsewhere_s: Sequence[float], limit_s: float) -> str:
    """Returns the reason why a node that has been silent for longer than `limit_s` is considered lost.

    `elsewhere_s` contains the time since the last message from each node on another machine, including the silent one.
    """
    text = f"nothing was received from it for {silent_s:.1f} s"
    if elsewhere_s and min(elsewhere_s) > limit_s / 2:
        text += (
            f", nor from any other machine: {socket.gethostname()}, which hosts the rendezvous, may be the one that is "
            "cut off"
        )
    return text


class RendezvousServer:
    """Serves the rendezvous on separate threads until `close` is called.

    One thread serves the nodes, and a second thread sends heartbeats. On a busy machine, the diagnosis of a failure may
    occupy the serving thread for several seconds. Without heartbeats from the second thread, the nodes would then
    consider the rendezvous lost.

    Args:
        listener: The listener that accepts connections; ownership passes to this object.
        silence_s: The silence after which a node counts as lost, in seconds.
        bears_starvation: Whether a longer silence is tolerated while a node's machine responds.
        on_foreign_job: See `AuthenticatedListener`.
    """

    def __init__(
        self,
        listener: ListeningEndpoint,
        secret: bytes | None,
        controller: JobController,
        silence_s: float,
        bears_starvation: bool = False,
        on_foreign_job: Callable[[str], None] | None = None,
    ) -> None:
        self._controller = controller
        self._bears_starvation = bears_starvation
        self._silence_s = silence_s
        self._nodes: dict[str, _Node] = {}
        self._accepted: list[Connection] = []
        self._count = 0
        self._closing_by_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._waiting, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        self._selector.register(self._waiting, selectors.EVENT_READ)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        key = derive_key(secret, CHANNEL)
        self._doorkeeper = AuthenticatedListener(
            listener, key, CHANNEL, self._admit, secret=secret, on_foreign_job=on_foreign_job
        )
        self._turned_s = time.monotonic()  # time at which the serving thread last began an iteration
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"paceline-rendezvous{suffix}", daemon=True)
            for target, suffix in ((self._serve, ""), (self._beat, "-beat"))
        ]
        for thread in self._threads:
            thread.start()

    def close(self, linger_s: float = 2.0) -> None:
        """Waits up to `linger_s` seconds for the nodes to disconnect, then stops serving. Idempotent."""
        if self._closing_by_s is None:
            self._closing_by_s = time.monotonic() + linger_s
            self.wake()
            for thread in self._threads:
                thread.join()
            self._doorkeeper.close()
            self._selector.close()
            self._waiting.close()
            self._waking.close()

    def wake(self) -> None:
        """Causes the serving thread to call the controller's `tick` soon, after a state change on another thread."""
        with contextlib.suppress(OSError):  # the server was closed, or the thread has not read earlier wake-ups yet
            self._waking.send(b".")

    def _admit(self, connection: Connection, _: PeerHello) -> None:
        connection.settimeout(_SEND_S)
        self._accepted.append(connection)
        self.wake()

    def _serve(self) -> None:
        try:
            self._take_turns()
        finally:
            self._is_over.set()

    def _take_turns(self) -> None:
        while self._closing_by_s is None or (self._nodes and time.monotonic() < self._closing_by_s):
            now_s = time.monotonic()
            if now_s - self._turned_s > HEARTBEAT_S + _STALL_S:
                for node in self._nodes.values():
                    node.last_received_s = max(node.last_received_s, now_s)
            self._turned_s = now_s
            until_s = min(now_s + HEARTBEAT_S, self._controller.deadline_s or math.inf)
            ready = self._selector.select(max(0.0, until_s - now_s))
            woken_s = time.monotonic()
            for key, _ in ready:
                if key.data is None:
                    self._welcome()
                else:
                    self._receive(key.data)
            self._drop_silent_nodes(woken_s)
            self._carry(self._controller.tick(time.monotonic()))
        for node in list(self._nodes.values()):
            node.close()

    def _welcome(self) -> None:
        self._waiting.recv(4096)
        while self._accepted:
            connection = self._accepted.pop(0)
            self._count += 1
            node = _Node(f"node-{self._count}", connection, time.monotonic())
            self._nodes[node.name] = node
            self._selector.register(connection, selectors.EVENT_READ, node)

    def _receive(self, node: _Node) -> None:
        if node.name not in self._nodes:
            return
        try:
            data = receive_now(node.connection, _LARGEST_READ)
            messages = node.inbox.feed(data)
        except BlockingIOError:  # an encrypted record is still incomplete
            return
        except (OSError, MessageError) as error:
            self._drop(node, str(error))
            return
        if not data:
            self._drop(node, "its launcher has ended", has_ended=True)
            return
        node.last_received_s = time.monotonic()
        for message in messages:
            if isinstance(message, TimeRequest):
                self._send(node, TimeResponse(message.requested_ns, time.monotonic_ns()))
            elif isinstance(message, Report):
                self._report(node, message)

    def _report(self, node: _Node, report: Report) -> None:
        """Forwards a report to the controller. Drops the node if the controller raises an exception."""
        try:
            orders = self._controller.reported(node.name, report, node.last_received_s)
        except Exception as error:  # an error caused by one node must not close the rendezvous for the other nodes
            seen = f"{type(report).__name__}, which led to {type(error).__name__}: {error}"
            self._drop(node, f"its launcher sent a {seen}")
        else:
            self._carry(orders)

    def _beat(self) -> None:
        while not self._is_over.wait(HEARTBEAT_S):
            if time.monotonic() - self._turned_s < _LONGEST_TURN_S:
                for node in list(self._nodes.values()):
                    node.send(Heartbeat())

    def _drop_silent_nodes(self, now_s: float) -> None:
        """Drops nodes that were silent for too long at `now_s`, and nodes to which sending failed.

        The time is a parameter, because this thread may have been busy and may not have read data received after
        `now_s`.
        """
        nodes = list(self._nodes.values())
        elsewhere = [now_s - node.last_received_s for node in nodes if node.is_elsewhere]
        for node in nodes:
            silent_s = now_s - node.last_received_s
            if node.fault:
                self._drop(node, node.fault)
            elif silent_s > self._silence_s and not (
                self._bears_starvation and is_starved(node.connection, silent_s, self._silence_s / 2)
            ):
                self._drop(node, explain_silence(silent_s, elsewhere, self._silence_s), silent_s=silent_s)

    def _carry(self, orders: Orders) -> None:
        for name, order in orders:
            if name not in self._nodes:
                continue
            if isinstance(order, NodeDropped):
                self._part(self._nodes.pop(name))
            else:
                self._send(self._nodes[name], order)

    def _send(self, node: _Node, order: Order) -> None:
        node.send(order)
        if node.fault:
            self._drop(node, node.fault)

    def _drop(self, node: _Node, why: str, has_ended: bool = False, silent_s: float = 0.0) -> None:
        if self._nodes.pop(node.name, None) is None:
            return
        self._part(node)
        now_s = time.monotonic()
        if has_ended:
            self._carry(self._controller.ended(node.name, why, now_s))
        else:
            self._carry(self._controller.lost(node.name, why, now_s, silent_s))

    def _part(self, node: _Node) -> None:
        self._selector.unregister(node.connection)
        node.part()
