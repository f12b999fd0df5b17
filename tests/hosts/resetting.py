"""Resets the connections of a process to other machines, as a firewall may do after losing its state."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket

_PIDFD_GETFD = 438  # the system call's number on every architecture


def reset_connections(pid: int) -> None:
    """Resets the connections of a process to other machines, at both ends."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed in the meantime
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    _reset(ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, int(name), 0))
    finally:
        os.close(pidfd)


def _reset(fd: int) -> None:
    with socket.socket(fileno=fd) as connection:
        connection.getpeername()  # raises an OSError for a listening socket
        if connection.family == socket.AF_INET and connection.getsockname()[0] != connection.getpeername()[0]:
            ctypes.CDLL(None).connect(fd, bytes(16), 16)  # with the family AF_UNSPEC, the kernel resets the connection
