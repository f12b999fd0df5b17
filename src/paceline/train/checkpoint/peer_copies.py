"""Replicas of checkpoints in the memory of launchers. `CheckpointManager` writes and restores these replicas.

`replicate.py` defines the steps of a replication, and `peer_memory` defines the protocol that launchers use.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from paceline.comm.engine.formation import host_id
from paceline.comm.security.untrusted_peers import encodable
from paceline.errors import CheckpointDamagedError, CheckpointError, PacelineError
from paceline.train.checkpoint.captured_state import TrainingState
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.load import LoadResult, load_by
from paceline.train.checkpoint.peer_memory.client import CacheClient, dial
from paceline.train.checkpoint.peer_memory.protocol import Inventory
from paceline.train.checkpoint.peer_memory.server import VARIABLE
from paceline.train.checkpoint.rank_channel import CollectiveChannel, RankChannel, background_channels, exchanged
from paceline.train.checkpoint.replicate import (
    CacheLocation,
    FoundCheckpoint,
    ReplicaSource,
    Replication,
    newest_cached,
    replicate_checkpoint,
    targets,
)
from paceline.train.checkpoint.save import outgoing_of
from paceline.train.checkpoint.save_plan import SavePlan

_OTHER_HOST_TIMEOUT_S = 3.0  # timeout for another host's cache, because the host may have been lost
_UNREACHABLE = (OSError, ValueError, PacelineError)


@dataclass(frozen=True)
class _ReplicationReport:
    """A rank's report to the others before a replication.

    Attributes:
        root: the path of the checkpoint directory on this rank.
        location: the cache of this rank's launcher, or None if it cannot be reached, for the reason `why`.
        whole: the sequence number and token of the newest checkpoint that, according to this rank, all caches have.
    """

    root: str
    location: CacheLocation | None
    whole: tuple[int, str] | None
    why: str


class PeerCopies:
    """The replicas of one manager's checkpoints.

    Args:
        path: the checkpoint directory on disk.
        count: the number of other hosts that keep a copy of each part.
    """

    def __init__(self, path: str, count: int) -> None:
        self._path, self._count = encodable(path), count
        self._own = os.environ.get(VARIABLE, "")  # the address of this host's cache, or "" without a launcher
        self._location: CacheLocation | None = None
        self._whole: tuple[int, str] | None = None  # sequence and token of the newest checkpoint in all caches
        self._has_warned = False
        self._why_not = ""  # the reason why the newest replicas were not restored

    def least_sequence(self) -> int:
        """Returns the smallest sequence number that makes the next checkpoint newer than the replicas."""
        return 0 if self._whole is None else self._whole[0] + 1

    def sender(self, plan: SavePlan, channel: CollectiveChannel) -> Callable[[], None] | None:
        """Returns a function that replicates a checkpoint in a separate thread; every rank must call this.

        Returns None if a rank cannot reach its launcher. The plan's memory must not change during the replication.
        """
        from_all = exchanged(self._replication_report, _ReplicationReport, channel)
        locations = [report.location for report in from_all if report.location is not None]
        if len(locations) < len(from_all):
            rank, absent = next((rank, report) for rank, report in enumerate(from_all) if report.location is None)
            self._warn(f"rank {rank}: {absent.why}", channel)
            return None
        wholes = [report.whole for report in from_all if report.whole is not None]
        _, *others = targets(locations, channel.rank, self._count)
        replication = Replication(
            root=from_all[0].root,
            draft=plan.draft,
            keep=max(wholes)[1] if wholes else None,
            pieces=[outgoing_of(held) for held in plan.held],
            values=plan.values,
            addresses=[self._own, *(location.address for location in others)],
            vaults={location.vault: location.address for location in locations},
        )
        token = plan.draft.token
        channels = background_channels(channel, f"{token}/copies", f"{token}/copied")
        return partial(self._replicate, replication, channels)

    def _replicate(self, replication: Replication, channels: Sequence[RankChannel]) -> None:
        """Replicates a checkpoint. Prints errors instead of raising them, because the checkpoint on disk is intact."""
        try:
            replicate_checkpoint(replication, channels, dial)
        except _UNREACHABLE as error:
            sys.stderr.write(
                f"paceline: {channels[0].me}: the checkpoint {replication.draft.name} has no copies in memory: "
                f"{error}. The checkpoint on disk is not affected\n"
            )
        else:
            self._whole = replication.draft.sequence, replication.draft.token

    def _replication_report(self) -> _ReplicationReport:
        why = f"{VARIABLE} is not set"
        if self._location is None and self._own:
            try:
                with contextlib.closing(dial(self._own)) as client:
                    answer = client.listen()
                self._location = CacheLocation(answer.vault, host_id(), answer.address)
            except _UNREACHABLE as error:
                why = str(error)
        return _ReplicationReport(self._path, self._location, self._whole, why)

    def _warn(self, why: str, channel: CollectiveChannel) -> None:
        if not self._has_warned and channel.rank == 0:
            sys.stderr.write(
                "paceline: peer_copies: no copies are kept in memory, because not every rank reaches a launcher of "
                f"`paceline run`, which would keep them ({why})\n"
            )
        self._has_warned = True

    def restore(
        self, state: TrainingState, channel: CollectiveChannel, newest_on_disk: Callable[[], int]
    ) -> LoadResult | None:
        """Loads the newest complete replica; every rank must call this.

        Returns None if the checkpoint must be loaded from disk: no replica is complete, or `newest_on_disk`, which
        every rank calls, returns the sequence number of a newer one.
        """
        self._whole = None
        root = channel.broadcast(self._path.encode()).decode()
        answers = exchanged(lambda: self._inventories(root, channel), list[Inventory], channel)
        inventories = [inventory for answer in answers for inventory in answer]
        found, why = newest_cached(inventories)
        sequence = newest_on_disk()
        if found is None or found.sequence < sequence:
            older = [] if found is None else [f"the copies of step {found.step} are older"]
            self._why_not = "; ".join([*why, *older])
            return None
        with ExitStack() as closing:
            source = _CacheReader(found, self._own, answers[channel.rank], inventories, closing)
            try:
                loaded = load_by(state, lambda: source.opened(root), channel)
            except CheckpointDamagedError as error:
                self._why_not = str(error)
                return None
        self._whole = found.sequence, found.token
        if channel.rank == 0:
            local = sum(source.is_on_own_host(file) for file in found.files)
            sys.stderr.write(
                f"paceline: restored step {found.step} from memory; the launcher of this host had {local} of the "
                f"{len(found.files)} files\n"
            )
        return loaded

    def report_disk_restore(self, step: int | None, channel: CollectiveChannel) -> None:
        """Prints, on rank 0, that the checkpoint was restored from disk and why no replica was used."""
        if channel.rank == 0:
            why = f" ({self._why_not})" if self._why_not else ""
            sys.stderr.write(f"paceline: restored step {step} from the disk{why}\n")

    def _inventories(self, root: str, channel: CollectiveChannel) -> list[Inventory]:
        """Returns the inventories of this host's cache and, if the job has one rank, of other hosts' caches."""
        found: list[Inventory] = []
        if self._own:
            with contextlib.suppress(*_UNREACHABLE), contextlib.closing(dial(self._own)) as client:
                found.append(client.look(root))
        known = {vault: address for one in found for entry in one.entries for vault, address in entry.vaults.items()}
        for vault, address in known.items() if channel.size == 1 else ():
            if address and vault != found[0].vault:
                with (
                    contextlib.suppress(*_UNREACHABLE),
                    contextlib.closing(dial(address, _OTHER_HOST_TIMEOUT_S)) as client,
                ):
                    found.append(client.look(root))
        return found


class _CacheReader:
    """Opens a cached checkpoint on one rank. Each file is read from the cache on the rank's own host if possible.

    Args:
        own_inventories: the inventories that this rank fetched, beginning with that of its own host.
        inventories: the inventories of all ranks.
    """

    def __init__(
        self,
        found: FoundCheckpoint,
        own: str,
        own_inventories: Sequence[Inventory],
        inventories: Sequence[Inventory],
        closing: ExitStack,
    ) -> None:
        self._found, self._own, self._closing = found, own, closing
        self._own_vault = own_inventories[0].vault if own_inventories else ""
        self._addresses = {inventory.vault: inventory.address for inventory in inventories}
        self._clients: dict[str, CacheClient] = {}

    def is_on_own_host(self, file: str) -> bool:
        return self._own_vault in self._found.holders[file]

    def opened(self, root: str) -> Checkpoint:
        try:
            manifest = self._client(self._found.describers).manifest(root, self._found.token)
        except _UNREACHABLE as error:
            raise CheckpointDamagedError(f"the manifest of the copies is missing: {error}") from error
        holders = self._found.holders
        source = ReplicaSource(
            root, self._found.token, manifest, self._found.files, lambda file: self._client(holders[file])
        )
        return Checkpoint(source, "")

    def _client(self, holders: Sequence[str]) -> CacheClient:
        """Returns a connection to one of these caches, preferably to the one on this host."""
        vault = self._own_vault if self._own_vault in holders else holders[0]
        if vault not in self._clients:
            address = self._own if vault == self._own_vault else self._addresses[vault]
            if not address:
                raise CheckpointError(f"the launcher with vault {vault} cannot be reached from this host")
            self._clients[vault] = dial(address)
            self._closing.callback(self._clients[vault].close)
        return self._clients[vault]
