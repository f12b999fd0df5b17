"""Connections that have proved nothing yet: a limited number, so that those who stay silent cannot keep others out.

Who is at the other end of a connection, as the kernel says.

Data from another process, which may be malformed in any way, as long as whoever reads it gets a `ValueError`.

Logs the connections that a listener refuses: a few in full, the rest as a count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_CREDENTIALS = struct.Struct("3i")

# The request and the answer of NETLINK_SOCK_DIAG for one TCP socket (linux/inet_diag.h).
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
_KIND = struct.Struct("=BBBBI")
_PORTS_AND_ADDRESSES = struct.Struct("!HH16s16s")
_ANYWHERE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_UID = struct.Struct("=I")
_UID_AT = _HEADER.size + 4 + 48 + 12
_LOOPBACK_PREFIXES = ("127.", "::1")
_ANSWER_S = 1.0


def is_same_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket runs as this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.getuid())


def origin_of_connection(connection: socket.socket) -> str:
    """Returns whose connection it is, see `origin_of`; empty if it has ended."""
    with contextlib.suppress(OSError):
        return origin_of(connection.getpeername(), connection.getsockname())
    return ""


def origin_of(peer: object, own: object) -> str:
    """Returns whose connection it is: a user of this machine, another host, or a network of IPv6.

    Args:
        peer: the address of the other end.
        own: the address of this end.

    >>> origin_of(("10.0.0.5", 4711), ("10.0.0.1", 29400)), origin_of(("2001:db8:0:1:a::1", 1, 0, 0), ("::", 2, 0, 0))
    ('10.0.0.5', '2001:db8:0:1::/64')
    """
    if not isinstance(peer, tuple) or not isinstance(own, tuple):
        return ""  # a Unix socket
    host = str(peer[0]).partition("%")[0]
    if host.startswith(_LOOPBACK_PREFIXES):
        with contextlib.suppress(OSError, struct.error):  # the kernel, or a sandbox, does not tell
            return f"user {_user_at(peer, own)}"
    if ":" in host:  # whoever has one address there usually has all of them
        network = socket.inet_pton(socket.AF_INET6, host)[:8] + bytes(8)
        return f"{socket.inet_ntop(socket.AF_INET6, network)}/64"
    return host


def _user_at(peer: tuple[object, ...], own: tuple[object, ...]) -> int:
    """Returns the user who made the socket with the address `peer`, which is connected to this machine's `own`.

    Raises:
        OSError: the kernel does not tell.
    """
    family = socket.AF_INET6 if ":" in str(peer[0]) else socket.AF_INET
    addresses = (socket.inet_pton(family, str(each[0]).partition("%")[0]) for each in (peer, own))
    body = _KIND.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    body += _PORTS_AND_ADDRESSES.pack(peer[1], own[1], *addresses) + _ANYWHERE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError("no such socket")
    user: int = _UID.unpack_from(answer, _UID_AT)[0]
    return user


Data = TypeVar("Data")
Decoded = TypeVar("Decoded")


def decode_untrusted(decode: Callable[[Data], Decoded], data: Data) -> Decoded:
    """Returns what a decoder of JSON or msgpack makes of `data`.

    Decoders raise a `RecursionError`, which is no `ValueError`, for what is nested too deeply.

    Raises:
        ValueError: the data cannot be decoded.
    """
    try:
        return decode(data)
    except RecursionError:
        raise ValueError("the data is nested too deeply") from None


def encodable(text: str) -> str:
    """Returns text that can be encoded: lone surrogates, which JSON can hold, are written as escapes.

    >>> encodable("a\\ud800b")
    'a\\\\ud800b'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


SHOWN = 3
PERIOD_S = 10.0
MAX_COUNTED_ADDRESSES = 1000  # further addresses are not counted, so that a flood does not fill memory

_log = logging.getLogger(__name__)


class RejectedConnections:
    """The refused connections of one listener.

    The first `SHOWN` are logged with their reasons. Further ones are counted and summed up in one line every
    `PERIOD_S` seconds, until a period passes without any.

    Args:
        channel: what the connections were for.
        period_s: the seconds that one summary covers.
    """

    def __init__(self, channel: str, period_s: float = PERIOD_S) -> None:
        self._channel = channel
        self._period_s = period_s
        self._changing = threading.Lock()
        self._shown = 0
        self._counted = 0
        self._addresses: set[str] = set()
        self._began_s = self._latest_s = time.monotonic()
        self._timer: threading.Timer | None = None
        self._closed = False

    def add(self, address: str, reason: object) -> None:
        """Logs or counts a refused connection from `address`, which is without its port."""
        with self._changing:
            now_s = time.monotonic()
            if self._timer is None and now_s - self._latest_s > self._period_s:
                self._shown = 0
            self._latest_s = now_s
            is_shown = self._shown < SHOWN
            if is_shown:
                self._shown += 1
            else:
                self._count(address, now_s)
        if is_shown:
            _log.warning("a connection for %r was refused: %s", self._channel, reason)

    def close(self) -> None:
        """Logs what has been counted so far; idempotent."""
        with self._changing:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._sum_up()

    def _count(self, address: str, now_s: float) -> None:
        if self._counted == 0:
            self._began_s = now_s
        self._counted += 1
        if len(self._addresses) < MAX_COUNTED_ADDRESSES:
            self._addresses.add(address)
        if self._timer is None and not self._closed:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self._period_s, self._sum_up)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # no more threads can be started: the next refusal tries again
            self._timer = None

    def _sum_up(self) -> None:
        with self._changing:
            count, addresses = self._counted, len(self._addresses)
            passed_s = time.monotonic() - self._began_s
            self._counted = 0
            self._addresses.clear()
            self._timer = None
            if count and not self._closed:
                self._start_timer()
        if count:
            _log.warning(
                "refused %d more connection%s for %r from %s%d address%s in the last %.0f s",
                count,
                "" if count == 1 else "s",
                self._channel,
                "at least " if addresses >= MAX_COUNTED_ADDRESSES else "",
                addresses,
                "" if addresses == 1 else "es",
                max(1.0, passed_s),
            )


Pending = TypeVar("Pending", bound=Hashable)


class PendingConnections(Generic[Pending]):
    """At most `most` connections. One more ends the oldest of those whose origin has the most of them.

    A peer that opens many connections thus ends its own, and one that opens few keeps its place.

    Args:
        most: see above.
        origin: returns whose a connection is. It is asked only once there are too many.
    """

    def __init__(self, most: int, origin: Callable[[Pending], str]) -> None:
        self._most = most
        self._origin = origin
        self._origins: dict[Pending, str | None] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._origins)

    def __iter__(self) -> Iterator[Pending]:
        """Yields the connections, the oldest first."""
        return iter(tuple(self._origins))

    def add(self, connection: Pending) -> Pending | None:
        """Adds a connection; returns the one that is to be ended for it, which is no longer pending."""
        self._origins[connection] = None
        if len(self._origins) <= self._most:
            return None
        for each, whose in self._origins.items():
            if whose is None:
                self._origins[each] = self._origin(each)
        counts = Counter(self._origins.values())
        largest = max(counts.values())
        oldest = next(each for each, whose in self._origins.items() if counts[whose] == largest)
        del self._origins[oldest]
        return oldest

    def remove(self, connection: Pending) -> bool:
        """Removes a connection; returns whether it was pending."""
        if connection not in self._origins:
            return False
        del self._origins[connection]
        return True
