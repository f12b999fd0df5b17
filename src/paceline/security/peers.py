"""Who is at the other end of a connection, as the kernel says."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

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
