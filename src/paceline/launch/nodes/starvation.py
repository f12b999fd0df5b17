"""Tells a launcher that gets no processor from one that is gone: its machine's kernel answers in any case.

A machine whose cores are all busy may not run a launcher for seconds. Its kernel acknowledges what comes all the same,
which that of a machine that is lost, or behind a network that is cut, does not.
"""

from __future__ import annotations

import socket
import struct

from paceline.security.encryption import Connection

PATIENCE_S = 30.0  # with a launcher that is silent while its machine answers

_INFO = struct.Struct("=2xB53xI")  # within `struct tcp_info` of linux/tcp.h: tcpi_retransmits, tcpi_last_ack_recv
_FEWEST_REPEATED = 2  # one repetition may cross with an answer that is only late


def is_starved(connection: Connection, silent_s: float, within_s: float) -> bool:
    """Returns whether the other end may only lack a processor.

    Args:
        connection: to the other launcher, to which something is sent several times within `within_s`.
        silent_s: for how long nothing has been heard of it.
        within_s: a machine that is not lost acknowledges in this time what it is sent.
    """
    if silent_s >= PATIENCE_S:
        return False
    try:
        repeated, last_answer_ms = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except (OSError, struct.error):
        return False
    return bool(repeated < _FEWEST_REPEATED or last_answer_ms * 1e-3 <= within_s)
