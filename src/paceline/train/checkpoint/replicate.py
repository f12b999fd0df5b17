"""Replicates checkpoints into the memory of launchers, and finds the newest checkpoint there.

Every rank writes its part into the caches on its own host and on the following hosts (`targets`). Once all ranks have
written their parts, all caches receive the manifest. A replica is valid once any cache has the manifest. If a rank dies
at any point, the previous replicas remain intact, because caches keep them until the next replication begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.train.checkpoint.format.manifest import FILE as MANIFEST
from paceline.train.checkpoint.format.manifest import (
    Draft,
    contribution_to_bytes,
    contributions_from_bytes,
    join_contributions,
    manifest_from_bytes,
    manifest_to_bytes,
)
from paceline.train.checkpoint.format.part_writer import WriteItem, write_part
from paceline.train.checkpoint.format.root import manifest_of
from paceline.train.checkpoint.format.values import Json
from paceline.train.checkpoint.peer_memory.client import CacheClient
from paceline.train.checkpoint.peer_memory.protocol import BeginCopy, CachedCheckpoint, Inventory
from paceline.train.checkpoint.rank_channel import RankChannel, decode_result, encode_result, require_success
from paceline.train.elastic.failpoints import failpoint

_READ_NBYTES = 32 << 20  # maximum number of bytes per request


@dataclass(frozen=True)
class CacheLocation:
    """The cache of a rank's launcher.

    Attributes:
        vault: the identity of the cache.
        host: the identity of the host.
        address: the address HOST:PORT at which other hosts reach the cache.
    """

    vault: str
    host: str
    address: str


def targets(locations: Sequence[CacheLocation], rank: int, copies: int) -> list[CacheLocation]:
    """Returns the caches into which a rank writes, beginning with its own.

    Hosts are ordered by their first ranks, and each host replicates to the hosts that follow it. Every host therefore
    stores about as much data for other hosts as they store for it. If there are fewer than `copies` other hosts, fewer
    copies are made.

    >>> a, b, c = (CacheLocation(f"v{host}", host, f"{host}:1") for host in "abc")
    >>> [each.host for each in targets([a, a, b, c], 1, 1)], [each.host for each in targets([a, a, b, c], 3, 2)]
    (['a', 'b'], ['c', 'a', 'b'])
    >>> [each.host for each in targets([a, a], 1, 1)]
    ['a']
    """
    firsts: dict[str, CacheLocation] = {}
    for location in locations:
        firsts.setdefault(location.host, location)
    hosts = list(firsts)
    own = hosts.index(locations[rank].host)
    others = [hosts[(own + distance) % len(hosts)] for distance in range(1, min(copies, len(hosts) - 1) + 1)]
    return [locations[rank], *(firsts[host] for host in others if firsts[host].address)]


@dataclass(frozen=True)
class Replication:
    """One rank's part of a checkpoint, and the caches to which it is replicated.

    Attributes:
        root: the path of the checkpoint directory on rank 0.
        keep: the token of the previous complete checkpoint, which caches keep during the replication, or None.
        addresses: the addresses of the caches to which this rank writes.
        vaults: the addresses at which other hosts reach the caches, by identity.
    """

    root: str
    draft: Draft
    keep: str | None
    pieces: Sequence[WriteItem]
    values: Mapping[str, Json]
    addresses: Sequence[str]
    vaults: Mapping[str, str]


def replicate_checkpoint(
    replication: Replication, channels: Sequence[RankChannel], dial: Callable[[str], CacheClient]
) -> None:
    """Replicates a checkpoint into caches, and returns when all of them have it; every rank must call this.

    The replication takes two rounds, each with its own channel: all ranks first write their parts and then the
    manifest. Rank 0 broadcasts the outcome of each round even if it could not gather the ranks' results, because the
    other ranks wait for the broadcast. `dial` connects to the cache at an address.
    """
    first, second = channels
    with ExitStack() as closing:
        clients: list[CacheClient] = []

        def write() -> bytes:
            for address in replication.addresses:
                clients.append(dial(address))
                closing.callback(clients[-1].close)
            return _write_own_part(replication, clients, first.rank)

        def commit() -> None:
            manifest = decode_result(verdict)
            files = {name: entry.nbytes for name, entry in manifest_from_bytes(manifest, "").files.items()}
            for client in clients:
                client.commit(replication.root, replication.draft.token, manifest, files, replication.vaults)

        written = encode_result(write, first.me)
        verdict = first.broadcast(
            encode_result(lambda: _manifest(replication, first.gather(written), first.size), first.me)
        )
        committed = encode_result(commit, second.me)
        outcome = encode_result(lambda: require_success(second.gather(committed)), second.me)
        decode_result(second.broadcast(outcome))
    failpoint("copies.done")


def _write_own_part(replication: Replication, clients: Sequence[CacheClient], rank: int) -> bytes:
    draft, nbytes = replication.draft, sum(piece.nbytes for piece in replication.pieces)
    for client in clients:
        client.begin(BeginCopy(replication.root, draft.token, draft.sequence, draft.step, replication.keep, nbytes))
    part = write_part(ReplicaTarget(clients, replication.root, draft.token), draft, rank, replication.pieces)
    return contribution_to_bytes(part, replication.values)


def _manifest(replication: Replication, answers: Sequence[bytes], size: int) -> bytes:
    """Returns the encoded manifest on rank 0, and b"" on the other ranks, where `answers` is empty."""
    if not answers:
        return b""
    contributions = join_contributions([decode_result(answer) for answer in answers])
    parts, values = contributions_from_bytes(contributions)
    return manifest_to_bytes(manifest_of(replication.draft, parts, values, size, None))


@dataclass(frozen=True)
class ReplicaTarget:
    """A `WritableStorage` that writes into several caches at once. Each cache must have confirmed `BeginCopy`."""

    clients: Sequence[CacheClient]
    root: str
    token: str

    def describe(self, name: str = "") -> str:
        """Returns the description of a file for error messages."""
        return f"the copy in memory of {name.rpartition('/')[2] or self.root}"

    def free_nbytes(self) -> int | None:
        """Returns None, because the caches have already granted the memory."""
        return None

    def create(self, name: str) -> _ReplicaOutput:
        """Creates a file in all caches."""
        return _ReplicaOutput(self, name.rpartition("/")[2])

    def sync_directory(self, name: str) -> None:
        """Does nothing, because a cache has a file as soon as the file is finished."""


@dataclass(frozen=True)
class _ReplicaOutput:
    target: ReplicaTarget
    file: str

    def write(self, views: Sequence[memoryview]) -> None:
        for client in self.target.clients:
            client.write(self.target.root, self.target.token, self.file, views)

    def commit(self) -> None:
        for client in self.target.clients:
            client.finish(self.target.root, self.target.token, self.file)

    def close(self) -> None:
        """Does nothing, because caches drop unfinished files when the connection is closed."""


@dataclass(frozen=True)
class ReplicaSource:
    """A `ReadableStorage` for one checkpoint, whose files are in caches.

    `files` contains the sizes of all files but the manifest in bytes, and `client_of` connects to a cache that has a
    file.
    """

    root: str
    token: str
    manifest: bytes
    files: Mapping[str, int]
    client_of: Callable[[str], CacheClient]

    def describe(self, name: str = "") -> str:
        """Returns the description of the checkpoint or of one of its files, for error messages."""
        return f"{self.root} in memory" + (f": {name}" if name else "")

    def free_nbytes(self) -> int | None:
        """Returns None, because nothing is written here."""
        return None

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes, or None if it does not exist."""
        return len(self.manifest) if name == MANIFEST else self.files.get(name)

    def open(self, name: str) -> _ReplicaInput:
        """Opens a file for reading; raises FileNotFoundError if it does not exist."""
        nbytes = self.size(name)
        if nbytes is None:
            raise FileNotFoundError(f"no {name}")
        return _ReplicaInput(self, name, nbytes)

    def share(self, directory: str) -> None:
        """Does nothing, because caches keep a complete checkpoint while the next one is replicated."""


@dataclass(frozen=True)
class _ReplicaInput:
    source: ReplicaSource
    file: str
    nbytes: int

    def size(self) -> int:
        return self.nbytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills a buffer from an offset; raises FileNotFoundError if the cache is lost or has dropped the file."""
        if self.file == MANIFEST:
            text = self.source.manifest[offset : offset + len(buffer)]
            buffer[: len(text)] = text
            return len(text)
        done, source = 0, self.source
        try:
            while done < len(buffer):
                part = buffer[done : done + _READ_NBYTES]
                client = source.client_of(self.file)
                count = client.read_into(source.root, source.token, self.file, offset + done, part)
                if count == 0:
                    break
                done += count
        except (OSError, PacelineError, ValueError) as error:
            raise FileNotFoundError(str(error)) from error
        return done

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint that was found in the caches.

    Attributes:
        files: the sizes of the checkpoint's files in bytes, by name.
        holders: for each file, the identities of the caches that have it.
        describers: the identities of the caches that have the manifest.
    """

    token: str
    sequence: int
    step: int | None
    files: Mapping[str, int]
    holders: Mapping[str, Sequence[str]]
    describers: Sequence[str]


def newest_cached(inventories: Sequence[Inventory]) -> tuple[FoundCheckpoint | None, list[str]]:
    """Returns the newest checkpoint whose files are all in caches, and the reasons why newer ones are incomplete.

    The inventories are those of all reachable caches, possibly with duplicates.
    """
    vaults = {inventory.vault: inventory for inventory in inventories}
    entries: dict[str, dict[str, CachedCheckpoint]] = {}
    for name, inventory in vaults.items():
        for entry in inventory.entries:
            entries.setdefault(entry.token, {})[name] = entry
    why: list[str] = []
    for token in sorted(entries, key=lambda token: (*_age(entries[token]), token), reverse=True):
        found, fault = _whole(token, entries[token])
        if found is not None:
            return found, why
        why.append(fault)
    return None, why


def _sequence(having: Mapping[str, CachedCheckpoint]) -> int:
    return max(entry.sequence for entry in having.values())


def _age(having: Mapping[str, CachedCheckpoint]) -> tuple[int, int]:
    """Returns a checkpoint's sort key. The step breaks ties, because a new rank 0 may reuse a sequence number."""
    return _sequence(having), max(-1 if entry.step is None else entry.step for entry in having.values())


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
        return None, f"no launcher has {missing[0]} of the copies of step {step}"
    return FoundCheckpoint(token, _sequence(having), step, files, holders, describers), ""
