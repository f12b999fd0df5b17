"""Network settings from PACELINE_* variables: address, congestion control, link costs, streams, algorithm and network.

This module does not import torch, because the launcher uses it to check the variables.

BBR, the default congestion control on many machines, paces packets. Within a data center, pacing delays packets for
longer than the transfer itself takes, which halves the throughput between two hosts (bench/hosts.py). Loss-based
congestion control does not pace packets and can use the full link.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.comm.one_port.dialer import DEFAULT_ROUTE_TARGETS, source_address
from paceline.comm.schedule.algorithms import ALGORITHMS
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import Network, NetworkLink, UplinkGroup, parse_links
from paceline.comm.security.encryption import Connection
from paceline.durations import whole_number
from paceline.errors import short_repr

IFACE_VARIABLE = "PACELINE_IFACE"

_SIOCGIFADDR = 0x8915


def own_address(peer: str | None, interface: str | None = None) -> str:
    """Returns the address to listen on and to connect from.

    Args:
        peer: the host of the rendezvous, or None. The result is the source address of the route to this host or, if
            that route does not leave this machine, of the default route.
        interface: the name of an interface, or one of this machine's addresses, to use instead of a route; the default
            is the value of PACELINE_IFACE.

    Raises:
        ValueError: `interface` is neither an interface nor an address of this machine, or is an interface without an
            address.
        OSError: there is no route to other machines.
    """
    interface = interface or os.environ.get(IFACE_VARIABLE)
    if interface:
        return _of_interface(interface)
    for target in (peer, *DEFAULT_ROUTE_TARGETS):
        if target is None:
            continue
        with contextlib.suppress(OSError):
            address = source_address(target)
            if not ipaddress.ip_address(address).is_loopback:
                return address
    raise OSError(
        f"this machine ({socket.gethostname()}) has no address that other hosts can reach; set {IFACE_VARIABLE} to the "
        "interface or address that they should use"
    )


def _of_interface(interface: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ValueError(f"{socket.gethostname()} has no interface {interface!r}; it has {', '.join(names)}")
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


CONGESTION_VARIABLE = "PACELINE_CONGESTION"

_PACED = "bbr"
_UNPACED = ("cubic", "reno")
_NEAR_US = 1000
_MIN_RTT_AT = 148  # the offset of tcpi_min_rtt (microseconds) in struct tcp_info (linux/tcp.h)
_INFO_BYTES = 152
_NAME_BYTES = 16


def set_congestion_control(connection: Connection) -> None:
    """Sets the TCP congestion control of `connection`, which must be established because its round-trip time is needed.

    PACELINE_CONGESTION selects the congestion control (one of net.ipv4.tcp_available_congestion_control). Without this
    variable, the system's default is used, except that cubic (or reno, if cubic is unavailable) replaces BBR if the
    round-trip time is less than a millisecond.

    Raises:
        ValueError: the kernel does not support the congestion control in PACELINE_CONGESTION, or does not permit this
            user to set it.
    """
    wanted = os.environ.get(CONGESTION_VARIABLE)
    if wanted:
        _choose(connection, wanted)
    elif _get(connection).startswith(_PACED) and _round_trip_us(connection) < _NEAR_US:
        for name in _UNPACED:
            with contextlib.suppress(OSError):
                _set(connection, name)
                return


def require_control(name: str) -> None:
    """Raises a ValueError unless the kernel supports the congestion control and permits this user to set it."""
    with socket.socket() as connection:
        _choose(connection, name)


def _choose(connection: Connection, name: str) -> None:
    try:
        _set(connection, name)
    except OSError as error:
        raise ValueError(
            f"{CONGESTION_VARIABLE} is {name!r}, which this kernel rejects ({error.strerror}); use one of those in "
            "/proc/sys/net/ipv4/tcp_allowed_congestion_control, or unset it"
        ) from None


def _get(connection: Connection) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return name.split(b"\0")[0].decode()


def _set(connection: Connection, name: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def _round_trip_us(connection: Connection) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int(struct.unpack_from("=I", info, _MIN_RTT_AT)[0]) if len(info) >= _INFO_BYTES else _NEAR_US


NETWORK_VARIABLE = "PACELINE_NETWORK"

_EXAMPLE = (
    '{"node": "1gbit,0.1ms", "nodes": {"3": "100mbit,0.1ms"}, "pairs": {"0-1": "100mbit,0.1ms"}, '
    '"groups": {"rack0": [[0, 1], "200mbit,1ms"]}}'
)


def read_network(text: str, model: CostModel, hosts: Sequence[Sequence[int]]) -> Network | None:
    """Returns the network described by the value of PACELINE_NETWORK, or None if the value is empty.

    The value is a JSON object with optional keys. `node` is the link of every host (default: as measured); `nodes`
    contains the links of individual hosts, numbered from 0 in rank order; `pairs` contains separate links between two
    hosts, for both directions; `groups` contains racks or regions, each with its hosts and their shared uplink. The
    format of a link is `1gbit,0.1ms,loss=0.1%`.

    Raises:
        ValueError: the text is malformed, or names hosts that do not exist.
    """
    if not text:
        return None
    described = parse_network(text)
    try:
        return replace(Network.of_costs(model, tuple(map(tuple, hosts))), **described)
    except (ValueError, TypeError) as error:
        raise _wrong(text, error) from error


def parse_network(text: str) -> dict[str, Any]:
    """Parses the value of PACELINE_NETWORK; returns the fields of `Network` that it sets.

    Raises:
        ValueError: the text is malformed.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or not set(data) <= {"node", "nodes", "pairs", "groups"}:
            raise ValueError("its keys must be node, nodes, pairs or groups")
        fields = {
            "nodes": {_host(host): _link(link) for host, link in data.get("nodes", {}).items()},
            "pairs": _pairs(data.get("pairs", {})),
            "groups": tuple(
                UplinkGroup(name, tuple(map(_host, members)), _link(uplink))
                for name, (members, uplink) in data.get("groups", {}).items()
            ),
        }
        return fields | ({"node": _link(data["node"])} if "node" in data else {})
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _wrong(text, error) from error


def _wrong(text: str, error: Exception) -> ValueError:
    return ValueError(f"{NETWORK_VARIABLE} is {short_repr(text)}: {error}; it must be JSON like {_EXAMPLE}")


def _link(text: str) -> NetworkLink:
    return parse_links(f"link={text}")["link"]


def _host(number: object) -> int:
    host = whole_number(str(number))
    if host is None:
        raise ValueError(f"{short_repr(number)} is not the number of a host")
    return host


def _pairs(described: Mapping[str, str]) -> dict[tuple[int, int], NetworkLink]:
    found = {}
    for name, text in described.items():
        one, other = map(_host, name.split("-", 1)) if "-" in name else (0, 0)
        if one == other:
            raise ValueError(f"{name!r} is not a pair of two hosts, such as 0-1")
        found[one, other] = found[other, one] = _link(text)
    return found


ALGORITHM_VARIABLE = "PACELINE_ALGORITHM"
COSTS_VARIABLE = "PACELINE_COSTS"
STREAMS_VARIABLE = "PACELINE_STREAMS"

_MOST_STREAMS = 64

ALL_TO_ALL_NBYTES = 1 << 20
"""The size in bytes that is assumed for every all_to_all.

All ranks must choose the same algorithm, but no rank has the sizes of all parts.
"""

# Typical costs of shared memory within a host and of fast Ethernet between hosts.
UNMEASURED = CostModel(LinkCost(2e-6, 1e-10), LinkCost(3e-5, 5e-10), 1e-10)


def known_algorithm(algorithm: str | None) -> str | None:
    """Returns `algorithm`, which may be None for the fastest one; raises a ValueError if there is no such algorithm."""
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"the algorithm is {algorithm!r} (an argument, or {ALGORITHM_VARIABLE}); it must be one of "
            f"{', '.join(ALGORITHMS)}, or unset to use the fastest"
        )
    return algorithm


def parse_costs(text: str) -> CostModel:
    """Parses the value of PACELINE_COSTS; raises a ValueError if it is malformed."""
    try:
        data = json.loads(text)
        # The third cost of a link is optional, and null in the costs that rank 0 publishes.
        links = [link[:2] if link[2:] == [None] else link for link in (data["within_host"], data["between_hosts"])]
        numbers = [*links[0], *links[1], data["gamma"]]
        if not all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers):
            raise ValueError("a cost is not a number of seconds")
        return CostModel(LinkCost(*links[0]), LinkCost(*links[1]), float(data["gamma"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{COSTS_VARIABLE} is {short_repr(text)}; it must be JSON like "
            '{"within_host": [2e-6, 1e-10], "between_hosts": [3e-5, 5e-10], "gamma": 1e-10}'
        ) from error


def parse_streams(text: str) -> int:
    """Parses the value of PACELINE_STREAMS, the number of connections between two hosts, or raises a ValueError."""
    streams = whole_number(text, least=1, most=_MOST_STREAMS)
    if streams is None:
        raise ValueError(f"{STREAMS_VARIABLE} is {short_repr(text)}; it must be a number from 1 to {_MOST_STREAMS}")
    return streams
