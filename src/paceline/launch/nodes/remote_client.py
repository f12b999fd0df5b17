"""A client of a meeting that another machine serves, or this one."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from paceline.errors import RendezvousTimeoutError
from paceline.launch.nodes.messages import End, Order, Report
from paceline.launch.nodes.wire import Lost, Wire, connect
from paceline.observe.clocks import Offset
from paceline.security.encryption import Connection
from paceline.security.handshake import HandshakeUnfinishedError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_ATTEMPT_S = 5.0
_SOON_S = 1.0
_ADVICE: dict[type[Exception], str] = {
    socket.gaierror: (
        "Check the name. In Kubernetes the pods have names if there is a headless Service with "
        "publishNotReadyAddresses: true, which `paceline launch-script k8s` prints"
    ),
    Exception: ("Check that the launcher of machine 0 runs, that the address is its, and that no firewall is between"),
}


class OrderQueue:
    """Orders that came in other threads, for the launcher's loop."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._changing = threading.Lock()
        self._waiting, self._waking = os.pipe()
        self._is_open = True

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""
        return self._waiting

    def put(self, order: Order) -> None:
        """Adds an order."""
        with self._changing:
            if self._is_open:
                self._orders.append(order)
                os.write(self._waking, b".")

    def receive(self) -> list[Order]:
        """Returns the orders that have come."""
        with self._changing:
            if self._orders:
                os.read(self._waiting, 4096)
            orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Closes the descriptors; idempotent."""
        with self._changing:
            if self._is_open:
                self._is_open = False
                os.close(self._waiting)
                os.close(self._waking)


class RemoteClient:
    """A client whose job ends when it loses the meeting."""

    deadline_s: float | None = None

    def __init__(
        self, connection: Connection, silence_s: float, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._queue = OrderQueue()
        self._wire = Wire(connection, silence_s, self._queue.put, self._lost, True, clock_ns)
        self.local_address = self._wire.local_address
        self._wire.start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""
        return self._queue.fileno()

    def clock_offset(self) -> Offset | None:
        """Returns what is known of the offset to the clock of the machine that serves the meeting."""
        return self._wire.clock_offset()

    def send(self, report: Report) -> None:
        """Sends a report."""
        self._wire.send(report)

    def receive(self) -> list[Order]:
        """Returns the orders that have come."""
        return self._queue.receive()

    def close(self) -> None:
        """Disconnects; idempotent."""
        self._wire.close()
        self._queue.close()

    def _lost(self, _: Lost, why: str) -> None:
        self._queue.put(End(1, lost_at(self._wire.peer, why)))


def lost_at(peer: str, why: str) -> str:
    """Returns what the user is told when the job ends because the meeting is lost."""
    return f"the launcher at {peer}, where the machines meet, was lost: {why}"


def dial(
    address: tuple[str, int], secret: bytes | None, timeout_s: float, silence_s: float, say: Callable[[str], None]
) -> RemoteClient:
    """Returns a client of the meeting, as soon as it is served; see `connect_in_time`."""
    return RemoteClient(connect_in_time(address, secret, timeout_s, say), silence_s)


def connect_in_time(
    address: tuple[str, int], secret: bytes | None, timeout_s: float, say: Callable[[str], None]
) -> Connection:
    """Connects as soon as the meeting is served; if that takes long, `say` tells the user what the launcher waits for.

    A name that nobody knows is looked up until then too: that of a pod becomes known only when it has been started.

    Raises:
        RendezvousTimeoutError: nobody served it in time.
        AuthenticationError: the server does not hold the job's secret.
        ValueError: the address is not loopback and there is no secret.
    """
    started_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    said: set[type[Exception]] = set()
    while True:
        left_s = started_s + timeout_s - time.monotonic()
        try:
            attempt_s = min(_ATTEMPT_S if said else _SOON_S, left_s)
            return connect(address, secret, max(0.1, attempt_s))  # looks the name up anew each time
        except (OSError, HandshakeUnfinishedError) as error:
            kind = socket.gaierror if isinstance(error, socket.gaierror) else Exception
            if left_s <= 0:
                raise RendezvousTimeoutError(
                    f"no launcher served the meeting at {address[0]}:{address[1]} for {timeout_s:.0f} s (the last "
                    f"attempt: {_in_words(error, address[0])}). {_ADVICE[kind]}"
                ) from error
            if kind not in said and time.monotonic() - started_s >= _SOON_S:
                said.add(kind)
                say(
                    f"waiting up to {timeout_s:.0f} s for a launcher at {address[0]}:{address[1]} "
                    f"({_in_words(error, address[0])})"
                )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _in_words(error: Exception, name: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"no machine is known by the name {name} yet: {error.strerror}"
    return str(error)
