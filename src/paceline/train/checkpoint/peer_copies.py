"""Copies of checkpoints in the memory of launchers, as a `CheckpointManager` makes and restores them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

import msgspec

from paceline.comm.engine.formation import host_id
from paceline.errors import CheckpointDamagedError, CheckpointError, PacelineError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.load import Loaded, load_by
from paceline.train.checkpoint.peer_memory.client import CacheClient, dial
from paceline.train.checkpoint.peer_memory.protocol import Inventory
from paceline.train.checkpoint.peer_memory.replicate import (
    CacheLocation,
    FoundCheckpoint,
    ReplicaSource,
    Replication,
    ReplicationChannel,
    newest_cached,
    replicate_checkpoint,
    targets,
)
from paceline.train.checkpoint.peer_memory.server import VARIABLE
from paceline.train.checkpoint.rank_channel import (
    GroupChannel,
    SingleRank,
    background_channel,
    decode_result,
    encode_result,
)
from paceline.train.checkpoint.save import outgoing_of
from paceline.train.checkpoint.save_plan import SavePlan
from paceline.train.checkpoint.training_state import TrainingState

_KNOWN_TIMEOUT_S = 3.0  # for a vault of another host that may be gone
_UNREACHABLE = (OSError, ValueError, PacelineError)


class PeerCopies:
    """The copies of one manager's checkpoints.

    Args:
        path: of the directory on the disk.
        count: on how many other hosts each part is kept.
    """

    def __init__(self, path: str, count: int) -> None:
        self._path, self._count = path, count
        self._own = os.environ.get(VARIABLE, "")  # of the launcher's vault; empty if no launcher started this process
        self._presence: CacheLocation | None = None
        self._whole: tuple[int, str] | None = None  # sequence and token of the newest that all vaults have
        self._has_warned = False
        self._why_not = ""  # the newest copies were not restored

    def least_sequence(self) -> int:
        """Returns the least number that the next checkpoint may have, so that it counts as newer than the copies."""
        return 0 if self._whole is None else self._whole[0] + 1

    def sender(self, prepared: SavePlan, talk: GroupChannel | SingleRank) -> Callable[[], None]:
        """Returns what copies a checkpoint, in a thread of its own; every rank calls this.

        Args:
            prepared: what this rank writes, from memory that does not change meanwhile.
        """
        answer = encode_result(self._introduction, talk.me)
        everyone = [json.loads(decode_result(each)) for each in talk.exchange(answer)]
        absent = [f"rank {rank}: {each['why']}" for rank, each in enumerate(everyone) if each["presence"] is None]
        if absent:
            self._warn(absent[0], talk)
            return _nothing
        presences = [CacheLocation(**each["presence"]) for each in everyone]
        wholes = [tuple(each["whole"]) for each in everyone if each["whole"] is not None]
        _, *others = targets(presences, talk.rank, self._count)
        copying = Replication(
            root=everyone[0]["root"],
            draft=prepared.draft,
            keep=max(wholes)[1] if wholes else None,
            pieces=[outgoing_of(each) for each in prepared.held],
            values=prepared.values,
            addresses=[self._own, *(each.address for each in others)],
            vaults={each.vault: each.address for each in presences},
        )
        token = prepared.draft.token
        talks: tuple[ReplicationChannel, ReplicationChannel] = talk, talk
        if isinstance(talk, GroupChannel):
            talks = background_channel(talk, f"{token}/copies"), background_channel(talk, f"{token}/copied")
        return partial(self._copy, copying, talks, talk.me)

    def _copy(self, copying: Replication, talks: tuple[ReplicationChannel, ReplicationChannel], me: str) -> None:
        """Copies a checkpoint; if that fails, it is said, and the one on the disk does not suffer."""
        try:
            replicate_checkpoint(copying, talks, dial, partial(encode_result, me=me), decode_result)
        except _UNREACHABLE as error:
            sys.stderr.write(
                f"paceline: {me}: the checkpoint {copying.draft.name} has no copies in memory: {error}. This does not "
                "concern the one on the disk\n"
            )
        else:
            self._whole = copying.draft.sequence, copying.draft.token

    def _introduction(self) -> bytes:
        why = f"{VARIABLE} is not set"
        if self._presence is None and self._own:
            try:
                with contextlib.closing(dial(self._own)) as client:
                    answer = client.listen()
                self._presence = CacheLocation(answer.vault, host_id(), answer.address)
            except _UNREACHABLE as error:
                why = str(error)
        presence = None if self._presence is None else asdict(self._presence)
        return json.dumps({"root": self._path, "presence": presence, "whole": self._whole, "why": why}).encode()

    def _warn(self, why: str, talk: GroupChannel | SingleRank) -> None:
        if not self._has_warned and talk.rank == 0:
            sys.stderr.write(
                "paceline: peer_copies: no copies are kept in memory, since not every rank reaches a launcher of "
                f"`paceline run`, which would keep them ({why})\n"
            )
        self._has_warned = True

    def restore(
        self, state: TrainingState, talk: GroupChannel | SingleRank, on_disk: Callable[[], int]
    ) -> Loaded | None:
        """Loads the newest whole checkpoint in memory, if the disk has no newer one; every rank calls this.

        Args:
            on_disk: returns the sequence of the newest whole checkpoint on the disk; every rank calls it.

        Returns:
            What was loaded; None if the disk is to be looked at.

        Raises:
            CheckpointError: the checkpoint is one of other objects; raised on every rank.
        """
        self._whole = None
        root = talk.announce(self._path.encode()).decode()
        answers = [
            json.loads(decode_result(each))
            for each in talk.exchange(encode_result(lambda: self._seen(root, talk), talk.me))
        ]
        inventories = [msgspec.convert(each, Inventory) for one in answers for each in one]
        found, why = newest_cached(inventories)
        sequence = on_disk()
        if found is None or found.sequence < sequence:
            older = [] if found is None else [f"the copies of step {found.step} are older"]
            self._why_not = "; ".join([*why, *older])
            return None
        with ExitStack() as closing:
            source = _Source(found, self._own, answers[talk.rank], inventories, closing)
            try:
                loaded = load_by(state, lambda: source.opened(root), talk)
            except CheckpointDamagedError as error:
                self._why_not = str(error)
                return None
        self._whole = found.sequence, found.token
        if talk.rank == 0:
            here = sum(source.is_here(file) for file in found.files)
            sys.stderr.write(
                f"paceline: restored step {found.step} from memory; the launcher of this host had {here} of the "
                f"{len(found.files)} files\n"
            )
        return loaded

    def report_disk_restore(self, step: int | None, talk: GroupChannel | SingleRank) -> None:
        """Says on rank 0 that the disk was read instead, and why."""
        if talk.rank == 0:
            why = f" ({self._why_not})" if self._why_not else ""
            sys.stderr.write(f"paceline: restored step {step} from the disk{why}\n")

    def _seen(self, root: str, talk: GroupChannel | SingleRank) -> bytes:
        """Returns what this host's vault has, and what others have that it knows of, if no ranks there will say it."""
        seen: list[Inventory] = []
        if self._own:
            with contextlib.suppress(*_UNREACHABLE), contextlib.closing(dial(self._own)) as client:
                seen.append(client.look(root))
        known = {vault: address for one in seen for each in one.entries for vault, address in each.vaults.items()}
        for vault, address in known.items() if talk.size == 1 else ():
            if address and vault != seen[0].vault:
                with contextlib.suppress(*_UNREACHABLE), contextlib.closing(dial(address, _KNOWN_TIMEOUT_S)) as client:
                    seen.append(client.look(root))
        return msgspec.json.encode(seen)


class _Source:
    """Opens a checkpoint in vaults, as one rank reads it: from its own host's where that has a file."""

    def __init__(
        self,
        found: FoundCheckpoint,
        own: str,
        seen: Sequence[Mapping[str, str]],
        inventories: Sequence[Inventory],
        closing: ExitStack,
    ) -> None:
        self._found, self._own, self._closing = found, own, closing
        self._here = seen[0]["vault"] if seen else ""
        self._addresses = {each.vault: each.address for each in inventories}
        self._clients: dict[str, CacheClient] = {}

    def is_here(self, file: str) -> bool:
        """Whether this host's vault has a file."""
        return self._here in self._found.holders[file]

    def opened(self, root: str) -> Checkpoint:
        """Opens the checkpoint.

        Raises:
            CheckpointDamagedError: a vault that has its manifest is gone.
        """
        try:
            manifest = self._client(self._found.describers).manifest(root, self._found.token)
        except _UNREACHABLE as error:
            raise CheckpointDamagedError(f"the manifest of the copies is gone: {error}") from error
        holders = self._found.holders
        source = ReplicaSource(
            root, self._found.token, manifest, self._found.files, lambda file: self._client(holders[file])
        )
        return Checkpoint(source, "")

    def _client(self, holders: Sequence[str]) -> CacheClient:
        """Returns a connection to one of these vaults, preferably to that of this host."""
        vault = self._here if self._here in holders else holders[0]
        if vault not in self._clients:
            address = self._own if vault == self._here else self._addresses[vault]
            if not address:
                raise CheckpointError(f"the launcher with vault {vault} cannot be reached from this host")
            self._clients[vault] = dial(address)
            self._closing.callback(self._clients[vault].close)
        return self._clients[vault]


def _nothing() -> None:
    pass
