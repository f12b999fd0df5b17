"""Tells a launcher that newly listens where an elastic job's machines meet that the job runs already."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from paceline.errors import AuthenticationError
from paceline.launch.nodes.framing import Inbox, MessageError, encode
from paceline.launch.nodes.messages import Answered, Running
from paceline.launch.nodes.wire import connect
from paceline.security.encryption import Connection
from paceline.security.handshake import HandshakeUnfinishedError

_PAUSE_S = 0.25
_LONG_PAUSE_S = 10.0  # after something else than a launcher with the job's secret has answered
_DIAL_S = 0.5
_ANSWER_S = 1.0


class EndpointCaller:
    """Calls at the address again and again, on a thread of its own, while nobody of the job listens there.

    The launcher that the job began with may be started again by whoever watches over it, with the same command. It
    cannot know where the others are, but they know its address.

    Args:
        address: where the machines of the job were told to meet; its name is looked up for each call.
        secret: the job's.
        running: returns what is to be told; None while another launcher of the job is to tell it, or nobody.
        is_here: returns whether the machine of that number is connected to this launcher, which coordinates the job.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes | None,
        running: Callable[[], Running | None],
        is_here: Callable[[int], bool],
    ) -> None:
        self._address, self._secret = address, secret
        self._running, self._is_here = running, is_here
        self._pause_s = _PAUSE_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-caller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Calls no more; idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        listens_there = -1  # the machine of the job that has answered last
        while not self._closed.wait(self._pause_s):
            self._pause_s = _PAUSE_S
            running = self._running()
            if running is None or (listens_there >= 0 and self._is_here(listens_there)):
                continue
            try:
                listens_there = self._call(running)
            except (AuthenticationError, HandshakeUnfinishedError, MessageError, ValueError):
                self._pause_s = _LONG_PAUSE_S
            except OSError:
                listens_there = -1

    def _call(self, running: Running) -> int:
        """Returns the number of the machine that listens there, if it takes part in the job; otherwise -1."""
        with contextlib.closing(connect(self._address, self._secret, _DIAL_S)) as connection:
            connection.sendall(encode(running))
            return _answer(connection, time.monotonic() + _ANSWER_S)


def _answer(connection: Connection, until_s: float) -> int:
    inbox = Inbox()
    while (left_s := until_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        data = connection.recv(1 << 16)
        for message in inbox.feed(data):
            if isinstance(message, Answered):
                return message.number
        if not data:
            break
    return -1
