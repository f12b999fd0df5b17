"""Plain sockets between ranks that start at different times."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path


def rank() -> int:
    return int(os.environ["RANK"])


def master() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def accept(address: str, port: int, timeout_s: float = 60) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as listener:
        listener.settimeout(timeout_s)
        connection, _ = listener.accept()
    connection.settimeout(timeout_s)
    return connection


def connect(address: str, port: int, timeout_s: float = 60) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address, port), timeout_s)
        except ConnectionRefusedError:  # the other rank is not listening yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def pair() -> socket.socket:
    """Yields one end of a connection between ranks 0 and 1."""
    return accept(*master()) if rank() == 0 else connect(*master())


def receive(connection: socket.socket, nbytes: int) -> bytes:
    told = bytearray()
    while len(told) < nbytes and (more := connection.recv(nbytes - len(told))):
        told += more
    return bytes(told)


def say(directory: str, what: str) -> None:
    """Signals an event to the test or another rank through a file, so that no network is needed."""
    Path(directory, what).touch()


def await_word(directory: str, *what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while missing := [word for word in what if not Path(directory, word).exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody said {missing} within {timeout_s} s")
        time.sleep(0.01)
