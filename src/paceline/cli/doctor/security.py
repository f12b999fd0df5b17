"""Security checks: the security level, the secret, OpenSSL, and the reachability of listening sockets.

The processes of jobs and their sockets are read from /proc, so a job in another container is not found.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from paceline.cli.doctor import Diagnostic, Severity
from paceline.comm.security.encryption import identity_of
from paceline.comm.security.secret import (
    INSECURE_VARIABLE,
    LEVEL_VARIABLE,
    chosen_level,
    is_insecure,
    is_loopback,
    job_secret,
)
from paceline.operate.launch.workers.cleanup import marked

_CORE = b"/paceline/_core."  # in the path of the core, which /proc/PID/maps lists
_LISTENS = "0A"  # TCP_LISTEN
_UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON
_MEANINGS = {
    None: "not chosen: connections are authenticated, and encrypted where an address is public",
    "auth": "auth: connections are authenticated and not encrypted",
    "encrypt": "encrypt: connections are authenticated, and encrypted between machines",
    "none": "none: connections are neither authenticated nor encrypted",
}


@dataclass(frozen=True, order=True)
class ListeningSocket:
    """A socket that accepts connections or datagrams from other processes."""

    kind: str  # tcp, tcp6, udp, udp6 or unix
    address: str  # a Unix socket's path, or "@" followed by its abstract name
    port: int = 0

    def __str__(self) -> str:
        return f"unix:{self.address}" if self.kind == "unix" else f"{self.kind}:{self.address}:{self.port}"


def check_security() -> list[Diagnostic]:
    """Reports the security level, the secret, OpenSSL, and the listening sockets of the current user's running jobs."""
    return [_level(), _secret(), _openssl(), *_listeners()]


def _level() -> Diagnostic:
    try:
        level = chosen_level()
    except ValueError as error:
        return Diagnostic(
            Severity.BAD, "level", str(error), "jobs do not start", f"correct {LEVEL_VARIABLE}, or unset it"
        )
    if level == "none" and is_insecure():
        why = "every process that reaches a port of the job can join it"
        return Diagnostic(
            Severity.BAD, "level", f"{_MEANINGS[level]}, also between machines", why, f"unset {INSECURE_VARIABLE}"
        )
    return Diagnostic(Severity.GOOD if level != "none" else Severity.NOTE, "level", _MEANINGS[level])


def _secret() -> Diagnostic:
    try:
        secret = job_secret()
    except (ValueError, OSError) as error:
        return Diagnostic(Severity.BAD, "secret", str(error), "jobs do not start", "see docs/security.md")
    seen = (
        "none in the environment; `paceline run` creates one for a job on one machine, and with --print-token or Slurm"
    )
    return Diagnostic(Severity.GOOD, "secret", seen if secret is None else "from the environment")


def _openssl() -> Diagnostic:
    try:
        identity_of(b"")
    except ValueError as error:
        why = (
            "connections between public addresses, and all between machines at the level encrypt, cannot be established"
        )
        return Diagnostic(Severity.NOTE, "OpenSSL", str(error), why, "install the system's OpenSSL")
    return Diagnostic(Severity.GOOD, "OpenSSL", "can be loaded, so connections can be encrypted")


def _listeners() -> list[Diagnostic]:
    jobs = processes_of_jobs()
    found = sorted(listening_sockets_of(jobs))
    if not found:
        running = f"none of {len(jobs)} processes of jobs" if jobs else "this user has no running job here"
        return [Diagnostic(Severity.GOOD, "listeners", running)]
    return [_reach(listener) for listener in found]


def processes_of_jobs() -> list[int]:
    """Returns the process ids of the current user's jobs.

    These are the processes that have loaded Paceline's core (launchers, ranks and their forks) and the processes with a
    job's mark in their environment (other programs started by a rank). A program without the mark is not found unless
    it imports Paceline.
    """
    return sorted({*marked(""), *_with_core()})


def _with_core() -> Iterator[int]:
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has exited or belongs to another user
            if directory.name != str(os.getpid()) and _CORE in (directory / "maps").read_bytes():
                yield int(directory.name)


def _reach(listener: ListeningSocket) -> Diagnostic:
    if listener.kind == "unix":
        return Diagnostic(Severity.GOOD, "listener", f"{listener}: reachable from this machine only")
    address = ip_address(listener.address)
    if is_loopback(listener.address):
        return Diagnostic(Severity.GOOD, "listener", f"{listener}: reachable from this machine only")
    if address.is_unspecified:
        why = "it listens on all interfaces; Paceline's own listeners have one address each"
        fix = "configure the program that opened it to listen on one address"
        return Diagnostic(
            Severity.BAD, "listener", f"{listener}: reachable from every network of this machine", why, fix
        )
    if address.is_global:
        why = (
            "the address is public; clients must prove that they have the job's secret, over TLS unless the level is "
            "auth"
        )
        return Diagnostic(
            Severity.NOTE, "listener", f"{listener}: reachable from the Internet", why, "use a firewall too"
        )
    return Diagnostic(Severity.GOOD, "listener", f"{listener}: reachable from the machines of its network")


def listening_sockets_of(pids: Iterable[int]) -> set[ListeningSocket]:
    """Returns the listening sockets and the bound UDP sockets of these processes."""
    found: set[ListeningSocket] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has exited or belongs to another user
            inodes = {inode for fd in Path(f"/proc/{pid}/fd").iterdir() if (inode := _socket_inode(fd))}
            found |= _network_sockets(pid, inodes) | _unix_sockets(pid, inodes)
    return found


def _network_sockets(pid: int, inodes: set[str]) -> set[ListeningSocket]:
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for row in _rows(pid, kind):
            if row[9] in inodes and (row[3] == _LISTENS or kind.startswith("udp")):
                address, _, port = row[1].rpartition(":")
                found.add(ListeningSocket(kind, _numeric(address), int(port, 16)))
    return found


def _unix_sockets(pid: int, inodes: set[str]) -> set[ListeningSocket]:
    return {
        ListeningSocket("unix", row[7] if len(row) > 7 else "")
        for row in _rows(pid, "unix")
        if row[6] in inodes and int(row[3], 16) & _UNIX_LISTENS
    }


def _socket_inode(fd: Path) -> str:
    try:
        link = os.readlink(fd)
    except OSError:  # the descriptor has been closed
        return ""
    return link.removeprefix("socket:[").removesuffix("]") if link.startswith("socket:[") else ""


def _rows(pid: int, kind: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]


def _numeric(packed: str) -> str:
    """Converts an address from the kernel's format: hexadecimal words in native byte order."""
    words = [int(packed[start : start + 8], 16) for start in range(0, len(packed), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
