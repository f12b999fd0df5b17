"""Routes from this machine: the source address that the kernel chooses for a target."""

from __future__ import annotations

import contextlib
import socket

DEFAULT_ROUTE_TARGETS = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849): no machine has them, so packets take the default route."""

_DISCARD_PORT = 9


def resolver_name(host: str) -> bytes | str:
    """Encodes an ASCII host name or address as bytes; for a `str`, `socket` imports a codec, which takes 4 to 6 ms."""
    return host.encode() if host.isascii() else host


def source_address(target: str) -> str:
    """Returns the local address from which packets to `target`, a host name or an address, are sent.

    Raises:
        OSError: there is no route to `target`.
    """
    for family, _, _, _, address in socket.getaddrinfo(resolver_name(target), _DISCARD_PORT, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(address)  # connecting a UDP socket sends nothing
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {target}")
