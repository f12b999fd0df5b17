"""Network namespaces without names: each exists while a process holds it open, so a killed run leaves none."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)  # os.setns and os.unshare were added in Python 3.12
_T = TypeVar("_T")


@dataclass(frozen=True)
class Host:
    """The name of a host, and the path of its network namespace."""

    name: str
    network: str


def enter(host: Host) -> None:
    """Moves the calling thread, and threads that it starts later, to a host."""
    enter_network(host.network)
    _checked(_libc.unshare(_CLONE_NEWUTS))
    socket.sethostname(host.name)


def enter_network(path: str) -> None:
    with open(path) as network:
        _checked(_libc.setns(network.fileno(), _CLONE_NEWNET))


class Namespace:
    """A network namespace that contains only the loopback interface."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            self._held = thread.submit(_make).result()

    @property
    def path(self) -> str:
        """Returns a path to the namespace that other processes can open while this one holds it."""
        return f"/proc/{os.getpid()}/fd/{self._held.fileno()}"

    def run(self, fn: Callable[..., _T], *args: object) -> _T:
        """Calls `fn` inside the namespace, on a temporary thread; the calling thread stays in its own namespace."""

        def inside() -> _T:
            _checked(_libc.setns(self._held.fileno(), _CLONE_NEWNET))
            return fn(*args)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(inside).result()

    def configure(self, tool: str, lines: list[str]) -> None:
        """Runs `ip` or `tc` commands, one per line, inside the namespace."""
        self.run(_batch, tool, lines)

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make() -> TextIO:
    _checked(_libc.unshare(_CLONE_NEWNET))
    for scope in ("all", "default"):  # without duplicate detection, which delays IPv6 by a second
        dad = Path(f"/proc/sys/net/ipv6/conf/{scope}/accept_dad")
        if dad.exists():
            dad.write_text("0")
    return open("/proc/thread-self/ns/net")


def _batch(tool: str, lines: list[str]) -> None:
    done = subprocess.run([tool, "-batch", "-"], input="\n".join(lines) + "\n", text=True, capture_output=True)
    if done.returncode:
        raise OSError(f"{tool} failed: {done.stderr.strip()}; it was to do:\n" + "\n".join(lines))


def _checked(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
