"""What a launcher holds for workers: files of checkpoints in memfds, of at most two generations of each root.

Several ranks write at the same time, so memory that was granted to one is counted as taken before it is. Where it is
short, the copies of other roots go, first those of the root for which the longest ago one was begun: a script may use
ever new directories.

How much memory a launcher may still take: what the machine has left, and what the limits of its cgroups leave.

The launcher's side of one connection: it does what a worker asks of the vault.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.comm.security.encryption import Connection, is_between_machines
from paceline.errors import PacelineError
from paceline.linux import memfd_create
from paceline.train.checkpoint.format.storage import size
from paceline.train.checkpoint.peer_memory.protocol import (
    Answer,
    BeginCopy,
    Bytes,
    CacheAddress,
    CachedCheckpoint,
    Commit,
    Done,
    Finish,
    GetAddress,
    GetManifest,
    Inventory,
    ListCheckpoints,
    Read,
    Request,
    RequestRefused,
    Write,
    receive_into,
    receive_request,
    send,
)


@dataclass(frozen=True)
class _CgroupFiles:
    """Where a version of cgroups says what a cgroup may take, what it takes, and what of that can be given back."""

    base: str
    limit: str
    usage: str
    reclaimable: str


_FIRST = _CgroupFiles("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_nbytes(root: Path = Path("/")) -> int:
    """Returns how many bytes of memory this process may still take; `root` is that of the file system."""
    with open(root / "proc/meminfo") as lines:
        machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return max(0, min([machine, *_left_by_cgroups(root)]))


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Yields what the limit of each cgroup leaves in which this process is; those without a limit are left out."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        names = _SECOND if number == "0" else _FIRST if "memory" in controllers.split(",") else None
        if names is None:
            continue
        own = Path(path.lstrip("/"))
        for each in (own, *own.parents):  # in a container, only the last one may be there, and be its own
            left = _left(root / names.base / each, names)
            if left is not None:
                yield left


def _left(directory: Path, names: _CgroupFiles) -> int | None:
    try:
        limit, usage = (int((directory / name).read_text()) for name in (names.limit, names.usage))
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return limit - usage + int(stat.get(names.reclaimable, 0))
    except (OSError, ValueError):  # there is no such cgroup, or it says "max"
        return None


_NAME = "paceline-copy"
_SPARE = 1.1  # of the memory that a copy takes, so much must be available


class RefusedError(Exception):
    """The vault does not do what it was asked for; the message is for the worker."""


@dataclass
class _Generation:
    begin: BeginCopy
    due: int = 0  # the bytes that ranks have announced, and not written yet
    files: dict[str, int] = field(default_factory=dict)  # the descriptors of those that are complete
    commit: Commit | None = None
    manifest: bytes = b""

    def entry(self) -> CachedCheckpoint:
        held = {name: os.fstat(descriptor).st_size for name, descriptor in self.files.items()}
        begin, commit = self.begin, self.commit
        if commit is None:
            return CachedCheckpoint(begin.token, begin.sequence, begin.step, held)
        return CachedCheckpoint(begin.token, begin.sequence, begin.step, held, commit.files, commit.vaults)

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


class CheckpointCache:
    """The memory; threads may use it at the same time.

    Args:
        available: returns how many bytes of memory may still be taken.
    """

    def __init__(self, available: Callable[[], int] = available_nbytes) -> None:
        self._available = available
        self._roots: dict[str, dict[str, _Generation]] = {}
        self._changing = threading.Lock()

    def begin(self, begin: BeginCopy) -> None:
        """Makes room for a checkpoint: of its root only the one to keep is left, and of others what there is room for.

        Raises:
            RefusedError: there is too little memory.
        """
        with self._changing:
            known = self._roots.pop(begin.root, {})
            self._roots[begin.root] = known  # the one that was used last comes last
            for token in [each for each in known if each not in (begin.token, begin.keep)]:
                known.pop(token).close()
            self._make_room(begin)
            known.setdefault(begin.token, _Generation(begin)).due += begin.nbytes

    def _make_room(self, begin: BeginCopy) -> None:
        while True:
            due = sum(each.due for known in self._roots.values() for each in known.values())
            available = self._available()
            if available >= (begin.nbytes + due) * _SPARE:
                return
            oldest = next(iter(self._roots))
            if oldest == begin.root:
                others = f", of which {size(due)} are for other copies that are being written" if due else ""
                raise RefusedError(
                    f"a copy of {size(begin.nbytes)} is too large for the {size(available)} of memory that are "
                    f"left{others}; take fewer hosts for peer_copies, or none"
                )
            for generation in self._roots.pop(oldest).values():
                generation.close()

    def wrote(self, root: str, token: str, nbytes: int) -> None:
        """Notes that a part of what was announced has been written: it is no longer among the memory that is left."""
        with self._changing:
            generation = self._roots.get(root, {}).get(token)
            if generation is not None:
                generation.due = max(0, generation.due - nbytes)

    def finish(self, finish: Finish, descriptor: int) -> None:
        """Takes over a memfd with a complete file.

        Raises:
            RefusedError: the checkpoint is not one that was begun, or was given up since.
        """
        with self._changing:
            generation = self._roots.get(finish.root, {}).get(finish.token)
            if generation is None or generation.commit is not None:
                os.close(descriptor)
                raise RefusedError(f"the checkpoint of {finish.file} was given up here, since another one was begun")
            with contextlib.suppress(KeyError):
                os.close(generation.files.pop(finish.file))
            generation.files[finish.file] = descriptor

    def commit(self, commit: Commit, manifest: bytes) -> None:
        """Notes that all ranks have written a checkpoint, and its manifest.

        Raises:
            RefusedError: it was given up.
        """
        with self._changing:
            generation = self._generation(commit.root, commit.token)
            generation.commit, generation.manifest, generation.due = commit, manifest, 0

    def look(self, root: str) -> list[CachedCheckpoint]:
        """Returns what there is of a root."""
        with self._changing:
            return [each.entry() for each in self._roots.get(root, {}).values()]

    def manifest(self, wanted: GetManifest) -> bytes:
        """Returns a checkpoint's manifest.

        Raises:
            RefusedError: it is not there.
        """
        with self._changing:
            return self._generation(wanted.root, wanted.token).manifest

    def read(self, wanted: Read) -> bytes:
        """Returns bytes of a file, fewer than asked for only at its end.

        Raises:
            RefusedError: the file is not there.
        """
        with self._changing:
            files = self._generation(wanted.root, wanted.token).files
            if wanted.file not in files:
                raise RefusedError(f"{wanted.file} is not here")
            return os.pread(files[wanted.file], wanted.count, wanted.at)

    def close(self) -> None:
        """Gives all memory back; idempotent."""
        with self._changing:
            for known in self._roots.values():
                for generation in known.values():
                    generation.close()
            self._roots.clear()

    def _generation(self, root: str, token: str) -> _Generation:
        generation = self._roots.get(root, {}).get(token)
        if generation is None:
            raise RefusedError("the checkpoint was given up here, since another one was begun")
        return generation


def new_file() -> int:
    """Returns the descriptor of an empty file in memory.

    Raises:
        OSError: there are no descriptors left.
    """
    return memfd_create(_NAME)


_PIECE_NBYTES = 1 << 20  # received at a time
_MOST_READ_NBYTES = 64 << 20  # of one answer


class Session:
    """A worker that writes or reads; files that it has not finished are forgotten with it.

    Args:
        connection: to the worker.
        vault: the launcher's.
        identity: the vault's.
        listen: returns where other hosts reach the vault; it is asked by workers of this host only.
    """

    def __init__(
        self, connection: Connection, vault: CheckpointCache, identity: str, listen: Callable[[], str]
    ) -> None:
        self._connection, self._vault, self._identity, self._listen = connection, vault, identity, listen
        self._open: dict[tuple[str, str, str], int] = {}
        self._faults: dict[tuple[str, str, str], str] = {}
        self._buffer = memoryview(bytearray(_PIECE_NBYTES))

    def run(self) -> None:
        """Answers requests until the worker closes the connection."""
        try:
            with contextlib.suppress(OSError, ValueError):  # the worker has died, or is none
                while (request := receive_request(self._connection)) is not None:
                    self._answer(request)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)

    def _answer(self, request: Request) -> None:
        if isinstance(request, Write):
            self._write(request)
            return
        payload = self._received(request.nbytes) if isinstance(request, Commit) else b""
        try:
            answer, data = self._done(request, payload)
        except (RefusedError, OSError, ValueError, MemoryError, PacelineError) as error:
            answer, data = RequestRefused(str(error) or "there is no memory left"), b""
        send(self._connection, answer, [data] if data else [])

    def _done(self, request: Request, payload: bytes) -> tuple[Answer, bytes]:
        match request:
            case GetAddress():
                if is_between_machines(self._connection):
                    raise RefusedError("only workers of the vault's own host may ask for its address")
                return CacheAddress(self._identity, self._listen()), b""
            case BeginCopy():
                self._vault.begin(request)
            case Finish():
                self._finish(request)
            case Commit():
                self._vault.commit(request, payload)
            case ListCheckpoints(root):
                return Inventory(self._identity, self._listen(), self._vault.look(root)), b""
            case GetManifest():
                data = self._vault.manifest(request)
                return Bytes(len(data)), data
            case Read(count=count):
                if count > _MOST_READ_NBYTES:
                    raise RefusedError(f"{count} bytes are too many for one answer")
                data = self._vault.read(request)
                return Bytes(len(data)), data
        return Done(), b""

    def _write(self, write: Write) -> None:
        """Appends to a file; what goes wrong is said when the file is finished, since nobody waits for an answer."""
        key = write.root, write.token, write.file
        left = write.nbytes
        while left:
            piece = self._buffer[: min(left, _PIECE_NBYTES)]
            receive_into(self._connection, piece)
            left -= len(piece)
            if key in self._faults:
                continue
            try:
                if key not in self._open:
                    self._open[key] = new_file()
                _write_all(self._open[key], piece)
                self._vault.wrote(write.root, write.token, len(piece))
            except OSError as error:
                self._faults[key] = str(error)
                if key in self._open:
                    os.close(self._open.pop(key))  # memory may be what is short

    def _finish(self, finish: Finish) -> None:
        key = finish.root, finish.token, finish.file
        descriptor, fault = self._open.pop(key, None), self._faults.pop(key, None)
        if descriptor is None:
            raise RefusedError(fault or f"nothing was written of {finish.file}")
        nbytes = os.fstat(descriptor).st_size
        if fault is not None or nbytes != finish.total:
            os.close(descriptor)
            raise RefusedError(fault or f"{nbytes} instead of {finish.total} bytes of {finish.file} have come")
        self._vault.finish(finish, descriptor)

    def _received(self, nbytes: int) -> bytes:
        """Returns bytes that follow a request; memory is taken as they come, not for what is announced."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self._buffer[: min(nbytes - len(data), _PIECE_NBYTES)]
            receive_into(self._connection, piece)
            data += piece
        return bytes(data)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
