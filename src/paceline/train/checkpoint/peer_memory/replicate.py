"""How a checkpoint is copied: every rank writes its part into vaults, and then all of these are given the manifest.

A copy counts once a vault has the manifest, which exists only when all ranks have written; so a rank that dies at any
step leaves the copies from before. Vaults keep those until the next copy is begun.

Which checkpoint in the vaults is the newest whole one, and where its files are.

Which vaults a rank writes its part into: that of its own host, and those of the next hosts.

Vaults as places: what `write_part` writes goes into several of them at once, and a checkpoint is read from any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import PacelineError
from paceline.train.checkpoint.format import manifest_json
from paceline.train.checkpoint.format.manifest import FILE as MANIFEST
from paceline.train.checkpoint.format.manifest import Draft
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.root import manifest_of
from paceline.train.checkpoint.format.values import Json
from paceline.train.checkpoint.peer_memory.client import CacheClient
from paceline.train.checkpoint.peer_memory.protocol import BeginCopy, CachedCheckpoint, Inventory
from paceline.train.elastic.failpoints import failpoint


@dataclass(frozen=True)
class FoundCheckpoint:
    """A whole checkpoint.

    Attributes:
        token, sequence, step: as in its manifest.
        files: their sizes.
        holders: for each file the identities of the vaults that have it.
        describers: the vaults that have the manifest.
    """

    token: str
    sequence: int
    step: int | None
    files: Mapping[str, int]
    holders: Mapping[str, Sequence[str]]
    describers: Sequence[str]


def newest_cached(inventories: Sequence[Inventory]) -> tuple[FoundCheckpoint | None, list[str]]:
    """Returns the newest checkpoint all of whose files some vault has, and why newer ones are not whole.

    Args:
        inventories: of all vaults that can be reached; a vault may be among them several times.
    """
    vaults = {each.vault: each for each in inventories}
    entries: dict[str, dict[str, CachedCheckpoint]] = {}
    for name, inventory in vaults.items():
        for entry in inventory.entries:
            entries.setdefault(entry.token, {})[name] = entry
    why: list[str] = []
    for token in sorted(entries, key=lambda each: (*_age(entries[each]), each), reverse=True):
        found, fault = _whole(token, entries[token])
        if found is not None:
            return found, why
        why.append(fault)
    return None, why


def _sequence(having: Mapping[str, CachedCheckpoint]) -> int:
    return max(each.sequence for each in having.values())


def _age(having: Mapping[str, CachedCheckpoint]) -> tuple[int, int]:
    """Returns what orders checkpoints. Two may have one sequence: a new first rank knows only those on the disk."""
    return _sequence(having), max(-1 if each.step is None else each.step for each in having.values())


def _whole(token: str, having: Mapping[str, CachedCheckpoint]) -> tuple[FoundCheckpoint | None, str]:
    describers = [name for name, entry in having.items() if entry.files is not None]
    step = next(iter(having.values())).step
    if not describers:
        return None, f"the copies of step {step} were not finished"
    files = having[describers[0]].files or {}
    holders = {
        file: [name for name, entry in having.items() if entry.held.get(file) == nbytes]
        for file, nbytes in files.items()
    }
    missing = [file for file, names in holders.items() if not names]
    if missing:
        return None, f"of the copies of step {step} no launcher has {missing[0]}"
    return FoundCheckpoint(token, _sequence(having), step, files, holders, describers), ""


@dataclass(frozen=True)
class CacheLocation:
    """Where a rank's launcher keeps copies.

    Attributes: `vault`, its identity; `host`, the same for all ranks of a machine; `address`, HOST:PORT for others.
    """

    vault: str
    host: str
    address: str


def targets(everyone: Sequence[CacheLocation], rank: int, copies: int) -> list[CacheLocation]:
    """Returns the vaults into which a rank writes, its own first.

    Hosts are in the order of their first ranks, and each has its copies on the ones that follow it, so that every host
    keeps about as much for others as others keep for it. There are fewer copies where there are fewer other hosts.

    >>> a, b, c = (CacheLocation(f"v{host}", host, f"{host}:1") for host in "abc")
    >>> [each.host for each in targets([a, a, b, c], 1, 1)], [each.host for each in targets([a, a, b, c], 3, 2)]
    (['a', 'b'], ['c', 'a', 'b'])
    >>> [each.host for each in targets([a, a], 1, 1)]
    ['a']
    """
    firsts: dict[str, CacheLocation] = {}
    for each in everyone:
        firsts.setdefault(each.host, each)
    hosts = list(firsts)
    own = hosts.index(everyone[rank].host)
    others = [hosts[(own + distance) % len(hosts)] for distance in range(1, min(copies, len(hosts) - 1) + 1)]
    return [everyone[rank], *(firsts[host] for host in others if firsts[host].address)]


_READ_NBYTES = 32 << 20  # of one request


class ReplicaTarget:
    """Where a rank writes its part: into all of these vaults, in each of which `Begin` has been said."""

    def __init__(self, clients: Sequence[CacheClient], root: str, token: str) -> None:
        self._clients, self._root, self._token = clients, root, token

    def describe(self, name: str = "") -> str:
        """Returns what messages call a file."""
        return f"the copy in memory of {name.rpartition('/')[2] or self._root}"

    def free_nbytes(self) -> int | None:
        """Returns None: the vaults have been asked when the copy was begun."""
        return None

    def create(self, name: str) -> _ReplicaFile:
        """Makes a file."""
        return _ReplicaFile(self._clients, self._root, self._token, name.rpartition("/")[2])

    def sync_directory(self, name: str) -> None:
        """Does nothing: a vault has a file when it is finished."""


class _ReplicaFile:
    def __init__(self, clients: Sequence[CacheClient], root: str, token: str, file: str) -> None:
        self._clients, self._root, self._token, self._file = clients, root, token, file

    def write(self, views: Sequence[memoryview]) -> None:
        for client in self._clients:
            client.write(self._root, self._token, self._file, views)

    def commit(self) -> None:
        for client in self._clients:
            client.finish(self._root, self._token, self._file)

    def close(self) -> None:
        """Does nothing: what is not finished is forgotten with the connection."""


class ReplicaSource:
    """A checkpoint whose files are in vaults, as a place that has this one only.

    Args:
        root: the directory on the disk that these are copies of.
        token: of the checkpoint.
        manifest: what its manifest's file would hold.
        files: their sizes.
        client_of: returns a connection to a vault that has a file.
    """

    def __init__(
        self,
        root: str,
        token: str,
        manifest: bytes,
        files: Mapping[str, int],
        client_of: Callable[[str], CacheClient],
    ) -> None:
        self._root, self._token, self._manifest, self._files = root, token, manifest, files
        self._client_of = client_of

    def describe(self, name: str = "") -> str:
        """Returns what messages call the checkpoint or a file of it."""
        return f"{self._root} in memory" + (f": {name}" if name else "")

    def free_nbytes(self) -> int | None:
        """Returns None: nothing is written here."""
        return None

    def size(self, name: str) -> int | None:
        """Returns a file's size in bytes; None if there is no such file."""
        return len(self._manifest) if name == MANIFEST else self._files.get(name)

    def open(self, name: str) -> _Text | _CachedFile:
        """Opens a file for reading.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if name == MANIFEST:
            return _Text(self._manifest)
        if name not in self._files:
            raise FileNotFoundError(f"there is no {name}")
        return _CachedFile(self._root, self._token, name, self._files[name], self._client_of)

    def share(self, directory: str) -> _Text:
        """Does nothing: a checkpoint stays until the second one after it is begun."""
        return _Text(b"")


class _Text:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read_into(self, at: int, buffer: memoryview) -> int:
        part = self._data[at : at + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


class _CachedFile:
    def __init__(self, root: str, token: str, file: str, nbytes: int, client_of: Callable[[str], CacheClient]) -> None:
        self._root, self._token, self._file, self._nbytes = root, token, file, nbytes
        self._client_of = client_of

    def size(self) -> int:
        return self._nbytes

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Fills a buffer; a vault that is gone, or has given the file up, is one without the file."""
        done = 0
        try:
            while done < len(buffer):
                part = buffer[done : done + _READ_NBYTES]
                count = self._client_of(self._file).read_into(self._root, self._token, self._file, at + done, part)
                if count == 0:
                    break
                done += count
        except (OSError, PacelineError, ValueError) as error:
            raise FileNotFoundError(str(error)) from error
        return done

    def close(self) -> None:
        pass


class ReplicationChannel(Protocol):
    """How ranks tell each other what they have done, as `talking.Talk`."""

    rank: int
    size: int

    def collect(self, mine: bytes) -> list[bytes]:
        """Returns what every rank has, on rank 0."""
        ...

    def announce(self, text: bytes) -> bytes:
        """Returns what rank 0 has."""
        ...


@dataclass(frozen=True)
class Replication:
    """What a rank copies where.

    Attributes:
        root: the directory on the disk, by rank 0's path.
        draft: of the checkpoint.
        keep: the token of the checkpoint that stays until this one is whole; None if there is none.
        pieces: what this rank writes.
        values: the plain values that it contributes.
        addresses: of the vaults that it writes into.
        vaults: all that take part, by identity, with their addresses for other hosts.
    """

    root: str
    draft: Draft
    keep: str | None
    pieces: Sequence[WriteItem]
    values: Mapping[str, Json]
    addresses: Sequence[str]
    vaults: Mapping[str, str]


def replicate_checkpoint(
    copying: Replication,
    talks: tuple[ReplicationChannel, ReplicationChannel],
    dial: Callable[[str], CacheClient],
    told: Callable[[Callable[[], bytes]], bytes],
    heard: Callable[[bytes], bytes],
) -> None:
    """Copies a checkpoint into vaults; every rank calls this. It is there on all of them when this returns.

    Rank 0 announces in either round what came of it, also if a rank could not be heard: the others wait for that.

    Args:
        talks: one for each of the two rounds.
        dial: connects to a vault.
        told, heard: turn what a rank has done, or why it could not, into bytes and back.

    Raises:
        CheckpointError: a rank or a vault failed.
    """
    first, second = talks
    with ExitStack() as closing:
        clients: list[CacheClient] = []

        def write() -> bytes:
            for address in copying.addresses:
                clients.append(dial(address))
                closing.callback(clients[-1].close)
            return _written(copying, clients, first.rank)

        def commit() -> bytes:
            manifest = heard(verdict)
            files = {name: each.nbytes for name, each in manifest_json.from_bytes(manifest, "").files.items()}
            for client in clients:
                client.commit(copying.root, copying.draft.token, manifest, files, copying.vaults)
            return b""

        written = told(write)
        verdict = first.announce(
            told(lambda: _manifest(copying, [heard(each) for each in first.collect(written)], first.size))
        )
        committed = told(commit)
        heard(second.announce(told(lambda: _require_all(second.collect(committed), heard))))
    failpoint("copies.done")


def _written(copying: Replication, clients: Sequence[CacheClient], rank: int) -> bytes:
    draft, nbytes = copying.draft, sum(each.nbytes for each in copying.pieces)
    for client in clients:
        client.begin(BeginCopy(copying.root, draft.token, draft.sequence, draft.step, copying.keep, nbytes))
    part = write_part(ReplicaTarget(clients, copying.root, draft.token), draft, rank, copying.pieces)
    return json.dumps([manifest_json.part_to_bytes(part).decode(), copying.values]).encode()


def _require_all(outcomes: Sequence[bytes], heard: Callable[[bytes], bytes]) -> bytes:
    for each in outcomes:
        heard(each)
    return b""


def _manifest(copying: Replication, everyone: Sequence[bytes], size: int) -> bytes:
    """Returns the manifest, on rank 0; where several ranks have a value, that of the first one counts."""
    if not everyone:
        return b""
    answers = [json.loads(each) for each in everyone]
    parts = [manifest_json.part_from_bytes(part.encode()) for part, _ in answers]
    values: dict[str, Json] = {}
    for _, own in reversed(answers):
        values |= own
    return manifest_json.to_bytes(manifest_of(copying.draft, parts, values, size, None))
