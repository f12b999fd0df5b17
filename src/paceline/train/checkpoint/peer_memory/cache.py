"""CheckpointCache holds checkpoint files in a launcher's memory, and Session serves the requests of one worker.

A cache holds the files of at most two checkpoints for each root, as memfds. Several ranks write at the same time, so
memory is counted as used as soon as it is granted. A script may use a new directory for each run. If memory is short,
checkpoints for other roots are therefore dropped, beginning with the least recently used root. The machine and its
cgroups limit the memory (`available_nbytes`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline import _core
from paceline.comm.security.encryption import Connection, is_between_machines
from paceline.errors import PacelineError
from paceline.linux import memfd_create
from paceline.train.checkpoint.format.storage import size_text
from paceline.train.checkpoint.peer_memory import protocol

_NAME = "paceline-copy"
_SPARE = 1.1  # the factor by which the available memory must exceed the size of a copy
_PIECE_NBYTES = 1 << 20  # number of bytes received at a time
_MOST_READ_NBYTES = 64 << 20  # maximum number of bytes in one response


# For cgroups of version 2 and of version 1: the files with the limit and the usage, and the name of the reclaimable
# memory in the file memory.stat.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_nbytes(root: Path = Path("/")) -> int:
    """Returns the number of bytes of memory that this process can still use. Tests pass another root directory."""
    with open(root / "proc/meminfo") as lines:
        machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    directories, _ = _core.cgroups("memory", str(root).rstrip("/"))
    left = [_left(Path(directory), *names) for directory in directories for names in _CGROUP_FILES]
    return max(0, min([machine, *(nbytes for nbytes in left if nbytes is not None)]))


def _left(directory: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        nbytes = int((directory / limit).read_text()) - int((directory / usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return nbytes + int(stat.get(reclaimable, 0))
    except (OSError, ValueError):  # the cgroup or the file does not exist, or the limit is "max"
        return None


class RefusedError(Exception):
    """Raised if the cache refuses a request. The message is sent to the worker."""


@dataclass
class _Replica:
    begin: protocol.BeginCopy
    due: int = 0  # number of bytes that ranks have announced but not written yet
    files: dict[str, int] = field(default_factory=dict)  # the descriptors of complete files, by name
    commit: protocol.Commit | None = None
    manifest: bytes = b""

    def entry(self) -> protocol.CachedCheckpoint:
        held = {name: os.fstat(descriptor).st_size for name, descriptor in self.files.items()}
        begin, commit = self.begin, self.commit
        if commit is None:
            return protocol.CachedCheckpoint(begin.token, begin.sequence, begin.step, held)
        return protocol.CachedCheckpoint(begin.token, begin.sequence, begin.step, held, commit.files, commit.vaults)

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


class CheckpointCache:
    """The checkpoints in a launcher's memory. Thread-safe. Requests that cannot be carried out raise RefusedError.

    `available` returns the number of bytes of memory that can still be used.
    """

    def __init__(self, available: Callable[[], int] = available_nbytes) -> None:
        self._available = available
        self._roots: dict[str, dict[str, _Replica]] = {}
        self._changing = threading.Lock()

    def begin(self, begin: protocol.BeginCopy) -> None:
        """Begins a checkpoint.

        Drops all other checkpoints for the same root except `begin.keep`. If memory is short, also drops checkpoints
        for other roots.
        """
        with self._changing:
            known = self._roots.pop(begin.root, {})
            self._roots[begin.root] = known  # the most recently used root is last
            for token in known.keys() - {begin.token, begin.keep}:
                known.pop(token).close()
            self._make_room(begin)
            known.setdefault(begin.token, _Replica(begin)).due += begin.nbytes

    def _make_room(self, begin: protocol.BeginCopy) -> None:
        while True:
            due = sum(replica.due for known in self._roots.values() for replica in known.values())
            available = self._available()
            if available >= (begin.nbytes + due) * _SPARE:
                return
            oldest = next(iter(self._roots))
            if oldest == begin.root:
                others = f", of which {size_text(due)} are for other copies that are being written" if due else ""
                raise RefusedError(
                    f"a copy of {size_text(begin.nbytes)} is too large for the {size_text(available)} of memory that "
                    f"are left{others}; use fewer hosts for peer_copies, or none"
                )
            for replica in self._roots.pop(oldest).values():
                replica.close()

    def wrote(self, root: str, token: str, nbytes: int) -> None:
        """Records that announced bytes have been written and no longer need to be reserved."""
        with self._changing:
            replica = self._roots.get(root, {}).get(token)
            if replica is not None:
                replica.due = max(0, replica.due - nbytes)

    def finish(self, finish: protocol.Finish, descriptor: int) -> None:
        """Adds a complete file, and takes ownership of its memfd."""
        with self._changing:
            replica = self._roots.get(finish.root, {}).get(finish.token)
            if replica is None or replica.commit is not None:
                os.close(descriptor)
                raise RefusedError(
                    f"the checkpoint of {finish.file} was discarded here because another one was started"
                )
            with contextlib.suppress(KeyError):
                os.close(replica.files.pop(finish.file))
            replica.files[finish.file] = descriptor

    def commit(self, commit: protocol.Commit, manifest: bytes) -> None:
        """Adds the manifest to a checkpoint that all ranks have written. This completes the checkpoint."""
        with self._changing:
            replica = self._replica(commit.root, commit.token)
            replica.commit, replica.manifest, replica.due = commit, manifest, 0

    def look(self, root: str) -> list[protocol.CachedCheckpoint]:
        """Returns the cached checkpoints for a root."""
        with self._changing:
            return [replica.entry() for replica in self._roots.get(root, {}).values()]

    def manifest(self, wanted: protocol.GetManifest) -> bytes:
        """Returns a checkpoint's manifest."""
        with self._changing:
            return self._replica(wanted.root, wanted.token).manifest

    def read(self, wanted: protocol.Read) -> bytes:
        """Returns bytes from a file. Returns fewer bytes than requested only at the end of the file."""
        with self._changing:
            files = self._replica(wanted.root, wanted.token).files
            if wanted.file not in files:
                raise RefusedError(f"{wanted.file} is not stored here")
            return os.pread(files[wanted.file], wanted.count, wanted.at)

    def close(self) -> None:
        """Frees all memory. Idempotent."""
        with self._changing:
            for known in self._roots.values():
                for replica in known.values():
                    replica.close()
            self._roots.clear()

    def _replica(self, root: str, token: str) -> _Replica:
        replica = self._roots.get(root, {}).get(token)
        if replica is None:
            raise RefusedError("the checkpoint was discarded here because another one was started")
        return replica


def new_file() -> int:
    """Creates an empty file in memory and returns its descriptor."""
    return memfd_create(_NAME)


class Session:
    """Serves the requests of one worker. Files that the worker has not finished are dropped when it disconnects.

    `identity` is the identity of the cache, and `listen` returns the address at which other hosts can reach it.
    """

    def __init__(
        self, connection: Connection, cache: CheckpointCache, identity: str, listen: Callable[[], str]
    ) -> None:
        self._connection, self._cache, self._identity, self._listen = connection, cache, identity, listen
        self._open: dict[tuple[str, str, str], int] = {}
        self._faults: dict[tuple[str, str, str], str] = {}
        self._buffer = memoryview(bytearray(_PIECE_NBYTES))

    def run(self) -> None:
        """Answers requests until the worker closes the connection."""
        try:
            with contextlib.suppress(OSError, ValueError):  # the worker has died, or has sent an invalid request
                while (request := protocol.receive_request(self._connection)) is not None:
                    self._answer(request)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)

    def _answer(self, request: protocol.Request) -> None:
        if isinstance(request, protocol.Write):
            self._write(request)
            return
        payload = self._received(request.nbytes) if isinstance(request, protocol.Commit) else b""
        try:
            answer, data = self._carry_out(request, payload)
        except (RefusedError, OSError, ValueError, MemoryError, PacelineError) as error:
            answer, data = protocol.RequestRefused(str(error) or "there is no memory left"), b""
        protocol.send(self._connection, answer, [data] if data else [])

    def _carry_out(self, request: protocol.Request, payload: bytes) -> tuple[protocol.Answer, bytes]:
        match request:
            case protocol.GetAddress():
                if is_between_machines(self._connection):
                    raise RefusedError("only workers of the vault's own host may ask for its address")
                return protocol.CacheAddress(self._identity, self._listen()), b""
            case protocol.BeginCopy():
                self._cache.begin(request)
            case protocol.Finish():
                self._finish(request)
            case protocol.Commit():
                self._cache.commit(request, payload)
            case protocol.ListCheckpoints(root):
                return protocol.Inventory(self._identity, self._listen(), self._cache.look(root)), b""
            case protocol.GetManifest():
                data = self._cache.manifest(request)
                return protocol.Bytes(len(data)), data
            case protocol.Read(count=count):
                if count > _MOST_READ_NBYTES:
                    raise RefusedError(f"{count} bytes are too many for one answer")
                data = self._cache.read(request)
                return protocol.Bytes(len(data)), data
        return protocol.RequestCompleted(), b""

    def _write(self, write: protocol.Write) -> None:
        """Appends to a file. Errors are reported when the file is finished, because writes do not have responses."""
        key = write.root, write.token, write.file
        left = write.nbytes
        while left:
            piece = self._buffer[: min(left, _PIECE_NBYTES)]
            protocol.receive_into(self._connection, piece)
            left -= len(piece)
            if key in self._faults:
                continue
            try:
                if key not in self._open:
                    self._open[key] = new_file()
                _write_all(self._open[key], piece)
                self._cache.wrote(write.root, write.token, len(piece))
            except OSError as error:
                self._faults[key] = str(error)
                if key in self._open:
                    os.close(self._open.pop(key))  # frees the file's memory, in case memory has run out

    def _finish(self, finish: protocol.Finish) -> None:
        key = finish.root, finish.token, finish.file
        descriptor, fault = self._open.pop(key, None), self._faults.pop(key, None)
        if descriptor is None:
            raise RefusedError(fault or f"nothing of {finish.file} was written")
        nbytes = os.fstat(descriptor).st_size
        if fault is not None or nbytes != finish.total:
            os.close(descriptor)
            raise RefusedError(fault or f"{nbytes} instead of {finish.total} bytes of {finish.file} were received")
        self._cache.finish(finish, descriptor)

    def _received(self, nbytes: int) -> bytes:
        """Receives the data of a request. Memory is allocated for received bytes only, not for announced ones."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self._buffer[: min(nbytes - len(data), _PIECE_NBYTES)]
            protocol.receive_into(self._connection, piece)
            data += piece
        return bytes(data)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
