"""Runs the loops of several jobs alternately: while one loop runs, the others sleep and do not affect its times."""

from __future__ import annotations

import socket
import statistics
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TIMEOUT_S = 300.0
_HELLO, _SECONDS = struct.Struct("16s"), struct.Struct("d")


class Turn:
    """A worker's connection to the benchmark: the worker waits before each turn and reports how long the turn took."""

    def __init__(self, directory: str, job: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(_TIMEOUT_S)
        self._connection.connect(str(Path(directory, "turns")))
        self._connection.sendall(_HELLO.pack(job.encode()))

    def wait(self) -> None:
        """Blocks until it is this job's turn."""
        _receive(self._connection, 1)

    def report(self, seconds: float) -> None:
        """Reports the duration of the turn."""
        self._connection.sendall(_SECONDS.pack(seconds))


class Turns:
    """The benchmark's connections to the workers of all jobs.

    Args:
        directory: The directory of the socket to which workers connect.
        workers: The number of workers of each job.
        jobs: The names of the jobs.
    """

    def __init__(self, directory: str, workers: int, jobs: tuple[str, ...]) -> None:
        self._workers, self._jobs = workers, jobs
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(directory, "turns")))
        self._listener.listen(workers * len(jobs))
        self._listener.settimeout(_TIMEOUT_S)
        self._connections: dict[str, list[socket.socket]] = {job: [] for job in jobs}

    def take(self, job: str) -> float:
        """Lets the workers of `job` run one turn; returns the median of their times, in seconds."""
        for connection in self._connections[job]:
            connection.sendall(b"!")
        answers = [_receive(connection, _SECONDS.size) for connection in self._connections[job]]
        seconds: list[float] = [_SECONDS.unpack(answer)[0] for answer in answers]
        return statistics.median(seconds)

    def meet(self) -> None:
        """Waits until all workers of all jobs have connected."""
        for _ in range(self._workers * len(self._jobs)):
            connection, _ = self._listener.accept()
            connection.settimeout(_TIMEOUT_S)
            (name,) = _HELLO.unpack(_receive(connection, _HELLO.size))
            self._connections[name.rstrip(b"\0").decode()].append(connection)

    def close(self) -> None:
        for connections in self._connections.values():
            for connection in connections:
                connection.close()
        self._listener.close()


@contextmanager
def turns(directory: str, workers: int, *jobs: str) -> Iterator[Turns]:
    """Yields a `Turns` object for these jobs."""
    made = Turns(directory, workers, jobs)
    try:
        yield made
    finally:
        made.close()


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the other side of the turns has ended")
        received += part
    return received
