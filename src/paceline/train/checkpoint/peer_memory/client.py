"""CacheClient: the worker's end of a connection to a `CheckpointCache`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from paceline.comm.one_port.dialer import dial as dial_machine
from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import TIMEOUT_S, connect_with_secret
from paceline.comm.security.secret import job_secret, require_secret
from paceline.errors import CheckpointError
from paceline.train.checkpoint.peer_memory import protocol
from paceline.train.elastic.failpoints import failpoint

A = TypeVar("A", bound=protocol.Answer)
_UNIX = "unix:"
_TIMEOUT_S = 60.0  # maximum time for the launcher to respond or to accept bytes


class CacheClient:
    """Writes checkpoint files into a cache, and reads them from it.

    The methods raise CheckpointError if the cache refuses a request, and OSError if the connection is lost.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._totals: dict[str, int] = {}

    def close(self) -> None:
        """Disconnects. The cache then drops unfinished files."""
        self._connection.close()

    def listen(self) -> protocol.CacheAddress:
        """Returns the identity of the cache, and its address for other hosts."""
        return self._request(protocol.GetAddress(), protocol.CacheAddress)

    def begin(self, wanted: protocol.BeginCopy) -> None:
        """Announces a checkpoint and the number of bytes that will be written."""
        failpoint("copies.begin")
        self._request(wanted, protocol.RequestCompleted)

    def write(self, root: str, token: str, file: str, views: Sequence[memoryview]) -> None:
        """Appends bytes to a file without waiting for a response. Errors are raised by `finish`."""
        failpoint("copies.write")
        nbytes = sum(view.nbytes for view in views)
        self._totals[file] = self._totals.get(file, 0) + nbytes
        with self._reaching():
            protocol.send(
                self._connection, protocol.Write(root, token, file, nbytes), [view for view in views if view.nbytes]
            )

    def finish(self, root: str, token: str, file: str) -> None:
        """Completes a file, and returns when the cache has all of it."""
        failpoint("copies.finish")
        self._request(protocol.Finish(root, token, file, self._totals.pop(file, 0)), protocol.RequestCompleted)

    def commit(
        self, root: str, token: str, manifest: bytes, files: Mapping[str, int], vaults: Mapping[str, str]
    ) -> None:
        """Sends the manifest, which completes the checkpoint."""
        failpoint("copies.commit")
        commit = protocol.Commit(root, token, files, vaults, len(manifest))
        self._request(commit, protocol.RequestCompleted, [manifest])

    def look(self, root: str) -> protocol.Inventory:
        """Returns the inventory of the cache for one root."""
        return self._request(protocol.ListCheckpoints(root), protocol.Inventory)

    def manifest(self, root: str, token: str) -> bytes:
        """Returns the manifest of a checkpoint."""
        answer = self._request(protocol.GetManifest(root, token), protocol.Bytes)
        data = bytearray(answer.nbytes)
        with self._reaching():
            protocol.receive_into(self._connection, memoryview(data))
        return bytes(data)

    def read_into(self, root: str, token: str, file: str, offset: int, buffer: memoryview) -> int:
        """Fills a buffer from a byte offset in a file; returns the number of bytes read."""
        answer = self._request(protocol.Read(root, token, file, offset, len(buffer)), protocol.Bytes)
        with self._reaching():
            protocol.receive_into(self._connection, buffer[: answer.nbytes])
        return answer.nbytes

    def _request(self, request: protocol.Request, kind: type[A], views: Sequence[bytes] = ()) -> A:
        with self._reaching():
            protocol.send(self._connection, request, views)
            answer = protocol.receive_answer(self._connection)
        if isinstance(answer, protocol.RequestRefused):
            raise CheckpointError(f"the launcher at {self.name} keeps no copy: {answer.reason}")
        assert isinstance(answer, kind)
        return answer

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"the launcher at {self.name}, which keeps copies, has ended or did not answer within "
                f"{_TIMEOUT_S:.0f} s ({error}); look at its output"
            ) from error


def dial(address: str, timeout_s: float = TIMEOUT_S) -> CacheClient:
    """Connects to the cache at an address, either unix:PATH or HOST:PORT.

    In a job with one port, PORT is the channel number. `timeout_s` limits the time for connecting. Raises
    AuthenticationError if the server has a different secret.
    """
    secret = job_secret()
    try:
        plain = _reached(address, timeout_s)
    except OSError as error:
        raise OSError(
            f"the launcher at {address}, which would keep copies, cannot be reached ({error}); check that it is "
            "running, and that no firewall blocks the connection"
        ) from error
    try:
        if plain.family != socket.AF_UNIX:
            require_secret(plain.getpeername()[0], secret)
    except BaseException:
        plain.close()
        raise
    connection = connect_with_secret(plain, secret, protocol.CHANNEL)
    connection.settimeout(_TIMEOUT_S)
    return CacheClient(connection, address)


def _reached(address: str, timeout_s: float) -> socket.socket:
    if not address.startswith(_UNIX):
        host, _, port = address.rpartition(":")
        return dial_machine((host.strip("[]"), int(port)), timeout_s)
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        plain.settimeout(timeout_s)
        plain.connect(address[len(_UNIX) :])
    except BaseException:
        plain.close()
        raise
    return plain
