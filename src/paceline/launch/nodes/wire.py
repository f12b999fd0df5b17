"""A launcher's connection to a server of the meeting, which threads of its own keep alive."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from paceline.launch.nodes.framing import Inbox, encode
from paceline.launch.nodes.messages import Alive, AskTime, Begin, Know, Message, Order, Report, Start, TellTime
from paceline.launch.nodes.server import CHANNEL, HEARTBEAT_S
from paceline.launch.nodes.starvation import is_starved
from paceline.observe.clocks import Offset, OffsetEstimate
from paceline.one_port.dialing import dial
from paceline.security.encryption import Connection, begin
from paceline.security.handshake import TIMEOUT_S, Hello, prove
from paceline.security.secret import derive_key, require_secret

_WELCOMES = (Start, Begin, Know)  # what a meeting says to a node that it has taken in
_RESETS = struct.pack("ii", 1, 0)  # SO_LINGER: closing the connection discards it


class Lost(Enum):
    """How a connection came to its end."""

    ENDED = auto()  # the other side closed it, after all that it had sent
    RESET = auto()  # the other side knows nothing of it, though it was heard of just now
    SILENT = auto()  # nothing was heard of the other side for too long, or since this process was stopped


class Wire:
    """A connection, whatever the launcher is busy with.

    Args:
        connection: the socket, which it takes over.
        silence_s: a connection that is silent for longer is lost.
        on_order: is called with each order, from a thread.
        on_lost: is called once, from a thread, when the connection is lost, with a reason for the user.
        bears_starvation: whether the other side may be silent for longer while its machine answers.
        clock_ns: the clock whose offset to the other side's is measured.
    """

    def __init__(
        self,
        connection: Connection,
        silence_s: float,
        on_order: Callable[[Order], None],
        on_lost: Callable[[Lost, str], None],
        bears_starvation: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._bears_starvation = bears_starvation
        self._offset = OffsetEstimate()
        self._measuring = threading.Lock()
        self._may_ask = False  # a meeting of another version must not get a message that it does not know
        self._connection = connection
        self._connection.settimeout(silence_s)
        self.local_address: str = connection.getsockname()[0]
        self.peer = "{}:{}".format(*connection.getpeername()[:2])
        self._silence_s = silence_s
        self._on_order, self._on_lost = on_order, on_lost
        self._heard_s = time.monotonic()
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=each, name="paceline-meeting-client", daemon=True)
            for each in (self._read, self._beat)
        ]

    def start(self) -> None:
        """Begins to listen."""
        for thread in self._threads:
            thread.start()

    def clock_offset(self) -> Offset | None:
        """Returns what is known of the offset to the clock of the other side."""
        with self._measuring:
            return self._offset.at(self._clock_ns())

    def send(self, report: Report) -> None:
        """Sends a report."""
        with self._sending, contextlib.suppress(OSError):  # the reading thread notices this too, and reports it
            self._connection.sendall(encode(report))

    def close(self, *, lives_on: bool = False) -> None:
        """Disconnects; idempotent. With `lives_on` the other side does not take it for the end of this launcher."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            if lives_on:
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                self._connection.shutdown(socket.SHUT_RD)
            else:
                self._connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    def _read(self) -> None:
        inbox = Inbox()
        while not self._closed.is_set():
            try:
                data = self._connection.recv(1 << 16)
                self._heard_s = time.monotonic() if data else self._heard_s
                for message in inbox.feed(data):
                    self._hear(message)
            except TimeoutError:
                silent_s = max(self._silence_s, time.monotonic() - self._heard_s)
                if self._bears_starvation and is_starved(self._connection, silent_s, self._silence_s / 2):
                    continue
                self._lost(Lost.SILENT, f"nothing was heard of it for {silent_s:.2g} s")
                return
            except (OSError, ValueError) as error:  # the latter if a message, or what it carries, cannot be read
                is_recent = time.monotonic() - self._heard_s <= self._silence_s
                is_reset = isinstance(error, ConnectionResetError) and is_recent
                self._lost(Lost.RESET if is_reset else Lost.SILENT, str(error))
                return
            if not data:
                self._lost(Lost.ENDED, "it has ended")
                return

    def _hear(self, message: Message) -> None:
        if isinstance(message, TellTime):
            self._hear_time(message)
        elif isinstance(message, Order):
            self._may_ask = self._may_ask or isinstance(message, _WELCOMES)
            self._on_order(message)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            self.send(AskTime(self._clock_ns()) if self._may_ask else Alive())

    def _hear_time(self, answer: TellTime) -> None:
        with self._measuring:
            self._offset.add(answer.asked_ns, answer.told_ns, self._clock_ns())

    def _lost(self, how: Lost, why: str) -> None:
        if not self._closed.is_set():
            self._on_lost(how, why)


def connect(address: tuple[str, int], secret: bytes | None, timeout_s: float) -> Connection:
    """Returns a connection to a server of the meeting, after both sides have proved the secret.

    Raises:
        OSError, HandshakeUnfinishedError: nobody serves it there.
        AuthenticationError: the server does not hold the job's secret.
        ValueError: the address is not loopback and there is no secret.
    """
    plain = dial(address, timeout_s)
    try:
        require_secret(plain.getpeername()[0], secret)
        if plain.getpeername() == plain.getsockname():
            raise ConnectionRefusedError("nobody listens there")
        connection = begin(plain, secret, TIMEOUT_S)
        prove(connection, derive_key(secret, CHANNEL), Hello(CHANNEL))
    except BaseException:
        plain.close()
        raise
    return connection
