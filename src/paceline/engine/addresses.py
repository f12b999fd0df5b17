"""Which of this machine's addresses the other hosts' ranks connect to."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from paceline.routes import ELSEWHERE, source_address

VARIABLE = "PACELINE_IFACE"

_SIOCGIFADDR = 0x8915


def own_address(peer: str | None, interface: str | None = None) -> str:
    """The address to listen on and to connect from.

    Args:
        peer: the host at which the ranks met; the address is the one that the route there starts at. Without one, or
            when the route does not leave this machine, the default route counts.
        interface: the name of an interface, or one of this machine's addresses, instead; by default what
            PACELINE_IFACE says.

    Raises:
        ValueError: `interface` is neither, or has no address.
        OSError: there is no route to anywhere.
    """
    interface = interface or os.environ.get(VARIABLE)
    if interface:
        return _of_interface(interface)
    for target in (peer, *ELSEWHERE):
        if target is None:
            continue
        with contextlib.suppress(OSError):
            address = source_address(target)
            if not ipaddress.ip_address(address).is_loopback:
                return address
    raise OSError(
        f"this machine ({socket.gethostname()}) has no address that other hosts reach; set {VARIABLE} to the interface "
        "or address that they should use"
    )


def _of_interface(interface: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ValueError(f"there is no interface {interface!r} on {socket.gethostname()}; it has {', '.join(names)}")
    address = _ipv4_of(interface) or _ipv6_of(interface)
    if address is None:
        raise ValueError(f"interface {interface!r} of {socket.gethostname()} has no address")
    return address


def _ipv4_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _ipv6_of(interface: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
