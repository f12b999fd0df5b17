"""Chooses the TCP congestion control of the connections between hosts.

BBR, the default on many machines, paces packets. Within a data centre the timers for that cost more than the network
does (bench/hosts.py shows half of the rate between two hosts), and a loss-based control fills the link just as well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from paceline.security.encryption import Connection

VARIABLE = "PACELINE_CONGESTION"

_PACED = "bbr"
_UNPACED = ("cubic", "reno")
_NEAR_US = 1000
_MIN_RTT_AT = 148  # the offset of tcpi_min_rtt, in microseconds, in struct tcp_info (linux/tcp.h)
_INFO_BYTES = 152
_NAME_BYTES = 16


def set_congestion_control(connection: Connection) -> None:
    """Sets the TCP congestion control of `connection`, whose handshake must be over so that its round trip is known.

    The control is the one that PACELINE_CONGESTION names (as in net.ipv4.tcp_available_congestion_control). Without
    that variable it remains the system's default, unless that is BBR and the peer is less than a millisecond away: then
    it is cubic or, failing that, reno.

    Raises:
        ValueError: the kernel lacks the control that PACELINE_CONGESTION names, or does not allow this user to set it.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        _choose(connection, wanted)
    elif _get(connection).startswith(_PACED) and _round_trip_us(connection) < _NEAR_US:
        for name in _UNPACED:
            with contextlib.suppress(OSError):
                _set(connection, name)
                return


def require_control(name: str) -> None:
    """Makes sure that this kernel has a congestion control that this user may choose.

    Raises:
        ValueError: it has not.
    """
    with socket.socket() as connection:
        _choose(connection, name)


def _choose(connection: Connection, name: str) -> None:
    try:
        _set(connection, name)
    except OSError as error:
        raise ValueError(
            f"{VARIABLE} is {name!r}, which this kernel refuses ({error.strerror}); take one of those in "
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
