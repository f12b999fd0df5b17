"""Finds the sockets on which processes listen, from /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"  # TCP_LISTEN
_UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON


@dataclass(frozen=True, order=True)
class Listener:
    """A socket to which strangers can speak.

    `kind` is tcp, tcp6, udp, udp6 or unix. A Unix socket's address is its path, with @ in front for the abstract ones.
    """

    kind: str
    address: str
    port: int = 0

    def __str__(self) -> str:
        return f"unix:{self.address}" if self.kind == "unix" else f"{self.kind}:{self.address}:{self.port}"


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """Returns the sockets on which these processes listen; those of UDP count as soon as they are bound."""
    found: set[Listener] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            inodes = {inode for fd in Path(f"/proc/{pid}/fd").iterdir() if (inode := _socket_inode(fd))}
            found |= _of_network(pid, inodes) | _of_machine(pid, inodes)
    return found


def _of_network(pid: int, inodes: set[str]) -> set[Listener]:
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for row in _rows(pid, kind):
            if row[9] in inodes and (row[3] == _LISTENS or kind.startswith("udp")):
                address, _, port = row[1].rpartition(":")
                found.add(Listener(kind, _numeric(address), int(port, 16)))
    return found


def _of_machine(pid: int, inodes: set[str]) -> set[Listener]:
    return {
        Listener("unix", row[7] if len(row) > 7 else "")
        for row in _rows(pid, "unix")
        if row[6] in inodes and int(row[3], 16) & _UNIX_LISTENS
    }


def _socket_inode(fd: Path) -> str:
    try:
        link = os.readlink(fd)
    except OSError:  # closed meanwhile
        return ""
    return link.removeprefix("socket:[").removesuffix("]") if link.startswith("socket:[") else ""


def _rows(pid: int, kind: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]


def _numeric(packed: str) -> str:
    """Returns an address that the kernel wrote as hexadecimal words in its own byte order."""
    words = [int(packed[at : at + 8], 16) for at in range(0, len(packed), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
