"""Whether the machines of a job have one port for all connections between them; PACELINE_PORT says which.

Connections within a machine never use it: they are Unix sockets, or lead to loopback.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from paceline.routes import for_resolver
from paceline.security.levels import is_loopback

VARIABLE = "PACELINE_PORT"
GATE_VARIABLE = "PACELINE_GATE"  # the name of the Unix socket at which the launcher gives numbers to its workers
_LARGEST = 65535


def chosen_port(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the port; None if each listener has one of its own.

    Raises:
        ValueError: PACELINE_PORT is not a port.
    """
    text = environment.get(VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= _LARGEST:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be a port from 1 to {_LARGEST}")
    return int(text)


def choose_port(port: int) -> None:
    """Chooses the port for this process and those that it starts, on behalf of a program that was given none.

    Raises:
        ValueError: it is not a port, or the environment names another one.
    """
    if not 1 <= port <= _LARGEST:
        raise ValueError(f"the port is {port}; it must be from 1 to {_LARGEST}")
    given = chosen_port()
    if given not in (None, port):
        raise ValueError(f"the port is {port} here and {given} in {VARIABLE}; leave one of them out")
    os.environ[VARIABLE] = str(port)


def leads_out(host: str) -> bool:
    """Returns whether a name or an address is one by which other machines could reach this one, or this one others.

    Raises:
        OSError: the name is not known.
    """
    return not is_loopback(str(socket.getaddrinfo(for_resolver(host), None, type=socket.SOCK_STREAM)[0][4][0]))
