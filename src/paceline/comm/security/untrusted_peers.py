"""Handling of peers that have not been authenticated.

The kernel reports the origin of a connection. The number of pending connections is limited, so that silent peers cannot
block others. The first rejected connections are logged in full, and later ones are counted and summarized. Malformed
data of any kind raises a `ValueError`.
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
from typing import Annotated, Generic, TypeVar

import msgspec

_CREDENTIALS = struct.Struct("3i")

# The NETLINK_SOCK_DIAG request and answer for one TCP socket (linux/inet_diag.h).
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
    """Returns True if the process at the other end of a Unix socket runs as this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.getuid())


def origin_of_connection(connection: socket.socket) -> str:
    """Returns the origin of a connection (see `origin_of`), or an empty string if the connection is closed."""
    with contextlib.suppress(OSError):
        return origin_of(connection.getpeername(), connection.getsockname())
    return ""


def origin_of(peer: object, own: object) -> str:
    """Returns a connection's origin: a user on this machine, another host, or an IPv6 network.

    Args:
        peer: the peer's address, as `socket` returns it.
        own: the address of this end.

    >>> origin_of(("10.0.0.5", 4711), ("10.0.0.1", 29400)), origin_of(("2001:db8:0:1:a::1", 1, 0, 0), ("::", 2, 0, 0))
    ('10.0.0.5', '2001:db8:0:1::/64')
    """
    if not isinstance(peer, tuple) or not isinstance(own, tuple):
        return ""  # the connection is a Unix socket
    host = str(peer[0]).partition("%")[0]
    if host.startswith(_LOOPBACK_PREFIXES):
        with contextlib.suppress(OSError, struct.error):  # the kernel or a sandbox forbids the query
            return f"user {_user_at(peer, own)}"
    if ":" in host:  # a host with one IPv6 address usually controls its entire /64 network
        network = socket.inet_pton(socket.AF_INET6, host)[:8] + bytes(8)
        return f"{socket.inet_ntop(socket.AF_INET6, network)}/64"
    return host


def _user_at(peer: tuple[object, ...], own: tuple[object, ...]) -> int:
    """Returns the id of the user who created the socket with the address `peer`, which is connected to `own`."""
    family = socket.AF_INET6 if ":" in str(peer[0]) else socket.AF_INET
    addresses = (socket.inet_pton(family, str(address[0]).partition("%")[0]) for address in (peer, own))
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


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # system calls do not accept larger numbers

Data = TypeVar("Data")
Decoded = TypeVar("Decoded")


def decode_untrusted(decode: Callable[[Data], Decoded], data: Data) -> Decoded:
    """Returns `decode(data)` for data from an untrusted peer; `decode` is a JSON or msgpack decoder.

    Raises a ValueError if the data cannot be decoded, including data nested so deeply that the decoder raises a
    RecursionError.
    """
    try:
        return decode(data)
    except RecursionError:
        raise ValueError("the data is nested too deeply") from None


def encodable(text: str) -> str:
    """Escapes lone surrogates, which JSON can contain but UTF-8 cannot encode.

    >>> encodable("a\\ud800b")
    'a\\\\ud800b'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


SHOWN = 3
PERIOD_S = 10.0
MAX_COUNTED_ADDRESSES = 1000  # bounds the memory that a flood of connections takes

_log = logging.getLogger(__name__)


class RejectedConnections:
    """Log of the connections that a listener for the service `channel` has rejected.

    The first `SHOWN` connections are logged with their reasons. Further ones are counted and summarized in one line
    every `period_s` seconds, until a period passes without rejections.
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
        """Logs or counts a rejected connection. `address` is the peer's address, without a port."""
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
        """Logs the connections counted so far; idempotent."""
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
        except RuntimeError:  # no thread can be started; the next rejected connection retries
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
    """Bounded set of connections. If it is full, a new one replaces the oldest one from the most frequent origin.

    A peer that opens many connections therefore replaces its own connections rather than those of peers with few
    connections. `origin` returns a connection's origin, and is called only when there are more than `most` connections.
    """

    def __init__(self, most: int, origin: Callable[[Pending], str]) -> None:
        self._most = most
        self._origin = origin
        self._origins: dict[Pending, str | None] = {}  # origins by connection, in the order of arrival

    def __len__(self) -> int:
        return len(self._origins)

    def __iter__(self) -> Iterator[Pending]:
        """Yields the connections from the oldest to the newest."""
        return iter(tuple(self._origins))

    def add(self, connection: Pending) -> Pending | None:
        """Adds a connection; returns the connection that it replaces, which the caller must close, or None."""
        self._origins[connection] = None
        if len(self._origins) <= self._most:
            return None
        for pending, origin in self._origins.items():
            if origin is None:
                self._origins[pending] = self._origin(pending)
        counts = Counter(self._origins.values())
        largest = max(counts.values())
        oldest = next(pending for pending, origin in self._origins.items() if counts[origin] == largest)
        del self._origins[oldest]
        return oldest

    def remove(self, connection: Pending) -> bool:
        """Removes a connection; returns whether it was pending."""
        was_pending = connection in self._origins
        self._origins.pop(connection, None)
        return was_pending
