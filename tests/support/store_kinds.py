"""Factories for each kind of store, for tests of their common interface and of each kind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from paceline import FileStore, HashStore, PrefixStore, Store, TCPStore
from paceline.comm.store.remote_store import connect_unix
from paceline.comm.store.tcp_store import StoreServer

SHORT = timedelta(milliseconds=50)
DEADLINE_S = 20
SECRET = b"a secret of this test, long enough"


def _tcp(_: Path) -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _unix(directory: Path) -> Store:
    server = StoreServer.on_unix_path(str(directory / "store"), SECRET)
    store = connect_unix(str(directory / "store"), SECRET)
    store.server = server
    return store


KINDS: dict[str, Callable[[Path], Store]] = {
    "hash": lambda _: HashStore(),
    "file": lambda directory: FileStore(directory / "store"),
    "tcp": _tcp,
    "unix": _unix,
    "prefix of tcp": lambda directory: PrefixStore("a", PrefixStore("b", _tcp(directory))),
    "prefix of file": lambda directory: PrefixStore("a", FileStore(directory / "store")),
}


def exit_code(child: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL
