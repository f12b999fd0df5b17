"""A client of a meeting that another machine serves, or this one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from paceline.errors import RendezvousTimeoutError
from paceline.launch.nodes.messages import (
    Alive,
    AskTime,
    Begin,
    End,
    Inbox,
    MessageError,
    Order,
    Report,
    Start,
    TellTime,
    encode,
)
from paceline.launch.nodes.server import CHANNEL, HEARTBEAT_S
from paceline.observe.clocks import Offset, OffsetEstimate
from paceline.security.handshake import HandshakeUnfinishedError, Hello, prove
from paceline.security.secret import derive_key, require_secret

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_ATTEMPT_S = 5.0
_SOON_S = 1.0
_WELCOMES = (Start, Begin)  # what a meeting says to a node that it has taken in


class RemoteClient:
    """A connection that threads of its own keep alive, whatever the launcher is busy with."""

    deadline_s: float | None = None

    def __init__(
        self, connection: socket.socket, silence_s: float, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock_ns = clock_ns
        self._offset = OffsetEstimate()
        self._may_ask = False  # a meeting of another version must not get a message that it does not know
        self._connection = connection
        self._connection.settimeout(silence_s)
        self.local_address: str = connection.getsockname()[0]
        self._peer = "{}:{}".format(*connection.getpeername()[:2])
        self._silence_s = silence_s
        self._orders: list[Order] = []
        self._changing = threading.Lock()
        self._sending = threading.Lock()
        self._waiting, self._waking = os.pipe()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=each, name="paceline-meeting-client", daemon=True)
            for each in (self._read, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are orders."""
        return self._waiting

    def clock_offset(self) -> Offset | None:
        """Returns what is known of the offset to the clock of the machine that serves the meeting."""
        with self._changing:
            return self._offset.at(self._clock_ns())

    def send(self, report: Report) -> None:
        """Sends a report."""
        with self._sending, contextlib.suppress(OSError):  # the reading thread notices this too, and reports it
            self._connection.sendall(encode(report))

    def receive(self) -> list[Order]:
        """Returns the orders that have come."""
        with self._changing:
            if self._orders:
                os.read(self._waiting, 4096)
            orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """Disconnects; idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            for thread in self._threads:
                thread.join()
            self._connection.close()
            os.close(self._waiting)
            os.close(self._waking)

    def _read(self) -> None:
        inbox = Inbox()
        while not self._closed.is_set():
            try:
                data = self._connection.recv(1 << 16)
                messages = inbox.feed(data)
            except TimeoutError:
                self._lost(f"nothing was heard of it for {self._silence_s:g} s")
                return
            except (OSError, MessageError) as error:
                self._lost(str(error))
                return
            if not data:
                self._lost("it has ended")
                return
            for message in messages:
                if isinstance(message, TellTime):
                    self._hear_time(message)
                elif isinstance(message, Order):
                    self._may_ask = self._may_ask or isinstance(message, _WELCOMES)
                    self._take(message)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.send(AskTime(self._clock_ns()) if self._may_ask else Alive())

    def _hear_time(self, answer: TellTime) -> None:
        with self._changing:
            self._offset.add(answer.asked_ns, answer.told_ns, self._clock_ns())

    def _lost(self, why: str) -> None:
        if not self._closed.is_set():
            self._take(End(1, f"the launcher at {self._peer}, where the machines meet, was lost: {why}"))

    def _take(self, order: Order) -> None:
        with self._changing:
            self._orders.append(order)
            os.write(self._waking, b".")


def dial(
    address: tuple[str, int], secret: bytes | None, timeout_s: float, silence_s: float, say: Callable[[str], None]
) -> RemoteClient:
    """Connects as soon as the meeting is served; if that takes long, `say` tells the user what the launcher waits for.

    Raises:
        RendezvousTimeoutError: nobody served it in time.
        AuthenticationError: the server does not hold the job's secret.
        ValueError: the address is not loopback and there is no secret.
    """
    started_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    is_said = False
    while True:
        left_s = started_s + timeout_s - time.monotonic()
        try:
            attempt_s = min(_ATTEMPT_S if is_said else _SOON_S, left_s)
            return RemoteClient(_attempt(address, secret, max(0.1, attempt_s)), silence_s)
        except (OSError, HandshakeUnfinishedError) as error:
            if left_s <= 0:
                raise RendezvousTimeoutError(
                    f"no launcher served the meeting at {address[0]}:{address[1]} for {timeout_s:.0f} s (the last "
                    f"attempt: {error}). Check that the launcher of machine 0 runs, that the address is its, and that "
                    "no firewall is between"
                ) from error
            if not is_said and time.monotonic() - started_s >= _SOON_S:
                is_said = True
                say(f"waiting up to {timeout_s:.0f} s for a launcher at {address[0]}:{address[1]} ({error})")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _attempt(address: tuple[str, int], secret: bytes | None, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(address, timeout_s)
    try:
        require_secret(connection.getpeername()[0], secret)
        if connection.getpeername() == connection.getsockname():
            raise ConnectionRefusedError("nobody listens there")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove(connection, derive_key(secret, CHANNEL), Hello(CHANNEL))
    except BaseException:
        connection.close()
        raise
    return connection
