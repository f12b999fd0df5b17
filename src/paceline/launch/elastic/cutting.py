"""Cuts the connections of a worker to other machines, as a router that forgets them would."""

from __future__ import annotations

import contextlib
import os
import socket

from paceline.system_calls import pidfd_getfd


def cut(pid: int, pidfd: int) -> int:
    """Shuts down the TCP connections of a process that lead to other machines; returns how many there were.

    Raises:
        OSError: the kernel does not let this process reach into that one.
    """
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        if not _is_socket(f"/proc/{pid}/fd/{name}"):
            continue
        with socket.socket(fileno=pidfd_getfd(pidfd, int(name))) as connection, contextlib.suppress(OSError):
            if _leads_elsewhere(connection):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _is_socket(link: str) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except OSError:  # closed meanwhile
        return False


def _leads_elsewhere(connection: socket.socket) -> bool:
    """Returns whether this is an established TCP connection between two machines."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    return bool(here != there)
