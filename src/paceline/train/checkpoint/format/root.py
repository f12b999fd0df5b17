"""Root, a directory of checkpoints: begins, publishes and removes checkpoints, and finds the newest complete one.

A checkpoint becomes visible atomically, and only when it survives the loss of power. Each step is durable before the
next begins: the files of all ranks, the manifest, the directory's name, and the pointer `latest`. Old checkpoints are
removed last.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline import __version__
from paceline.errors import CheckpointError
from paceline.train.checkpoint.format import manifest_json
from paceline.train.checkpoint.format.checkpoint import Checkpoint, Listing, latest_name, listing_of
from paceline.train.checkpoint.format.manifest import (
    FILE,
    LATEST,
    REMOVING,
    WRITING,
    Draft,
    Manifest,
    RankPart,
    draft_of,
    is_name,
    merged,
)
from paceline.train.checkpoint.format.storage import OutputFile, Storage, check_room, open_storage, storage_error
from paceline.train.checkpoint.format.values import Json
from paceline.train.elastic.failpoints import failpoint

_TOKEN_NBYTES = 4


class Root:
    """A directory of checkpoints.

    One rank begins a checkpoint, all ranks write their parts (`write_part`), and the rank that began it publishes it:

        draft = root.begin(42)
        part = write_part(root.storage, draft, 0, pieces)
        root.publish(draft, [part], values, world_size=1)
        root.retire(keep=3)
    """

    def __init__(self, where: str | os.PathLike[str] | Storage) -> None:
        """Creates the root for a path, an address for fsspec, or a storage, which need not exist yet."""
        self.storage: Storage = open_storage(where) if isinstance(where, (str, os.PathLike)) else where
        self._held: dict[str, OutputFile] = {}

    def begin(
        self,
        step: int | None = None,
        *,
        nbytes: int | None = None,
        unique: bool = False,
        sequence: int | None = None,
        least_sequence: int = 0,
    ) -> Draft:
        """Begins a checkpoint, and removes the remains of dead saves; returns the draft, for all ranks.

        Args:
            step: the training step, for the name.
            nbytes: the number of bytes that all ranks will write here, to compare with the free space; None if it is
                unknown.
            unique: whether to choose a name that is not in use on any host, for disks that hosts do not share. The
                first rank of every other host then calls `join`.
            sequence: the sequence number, at least the largest `next_sequence` of all hosts; by default that of this
                host.
            least_sequence: the smallest value of the default.

        Raises:
            CheckpointError: the directory cannot be created, or there is too little free space.
        """
        with self._preparing(nbytes):
            draft = draft_of(
                step,
                max(least_sequence, self.next_sequence()) if sequence is None else sequence,
                secrets.token_hex(_TOKEN_NBYTES),
                self.storage.names(),
                renames=self.storage.renames,
                is_unique=unique,
            )
            self._create(draft)
        return draft

    def join(self, draft: Draft, *, nbytes: int | None = None) -> None:
        """Creates the directory of a checkpoint that another host's rank began, on this host's disk; see `begin`."""
        with self._preparing(nbytes):
            self._create(draft)

    @contextlib.contextmanager
    def _preparing(self, nbytes: int | None) -> Iterator[None]:
        with self._refusing("prepare"):
            remove_left_overs(self.storage)
            if nbytes is not None:
                check_room(self.storage, nbytes)
            yield

    def _create(self, draft: Draft) -> None:
        """Creates the directory in which ranks write; if the storage renames, its manifest is kept open and locked."""
        self.storage.make_directory("")
        self.storage.make_directory(draft.directory)
        if self.storage.renames:
            self._held[draft.token] = self.storage.create(f"{draft.directory}/{FILE}")

    def next_sequence(self) -> int:
        """Returns the sequence number of the next checkpoint, greater than those of all checkpoints here."""
        return 1 + max((listing.sequence or 0 for listing in self.listing()), default=0)

    def publish(
        self,
        draft: Draft,
        parts: Sequence[RankPart],
        values: Json,
        *,
        world_size: int,
        here: Sequence[str] | None = None,
    ) -> Manifest:
        """Makes a checkpoint visible after its parts were written; it survives the loss of power when this returns.

        Args:
            parts: the results of `write_part` on all ranks.
            values: the plain values, from `values.encode`.
            world_size: the number of ranks that wrote.
            here: the files that this directory has, if hosts do not share it; all files by default.

        Raises:
            CheckpointError: the parts do not form one state, or the disk failed; earlier checkpoints are untouched.
        """
        manifest = manifest_of(draft, parts, values, world_size, here)
        with self._refusing("write"):
            publish(self.storage, draft, manifest, self._held.pop(draft.token, None))
        return manifest

    def abandon(self, draft: Draft) -> None:
        """Removes the files of a checkpoint that failed, as far as possible."""
        held = self._held.pop(draft.token, None)
        if held is not None:
            held.close()
        with contextlib.suppress(OSError):
            self.storage.remove(draft.directory)

    def retire(self, keep: int) -> list[str]:
        """Removes all but the `keep` newest complete checkpoints; returns the names of the removed ones.

        A checkpoint stays if `latest` names it, if it is being read, or if its manifest, which may have a newer
        version, cannot be read. Directories that no save created also stay. If no checkpoint is complete, all stay.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        removed = []
        with self._refusing("remove old checkpoints in"):
            listings = [listing for listing in self.listing() if listing.sequence is not None]
            kept = _to_keep(listings, keep)
            latest = latest_name(self.storage)
            for name in [listing.name for listing in listings if kept and listing.name not in kept]:
                if name != latest and not self.storage.is_held(name):
                    remove(self.storage, name)
                    removed.append(name)
        return removed

    def listing(self) -> list[Listing]:
        """Returns the checkpoints: first those whose manifest cannot be read, then the others, newest first.

        If a checkpoint has no fault, all its files exist and have the right sizes.
        """
        return listing_of(self.storage)

    def newest_whole(self, *, digests: bool = False) -> tuple[Listing | None, list[Listing]]:
        """Returns the newest checkpoint without a fault, and the skipped ones with their faults.

        Args:
            digests: whether to compare the digests of all files, rather than only their sizes.
        """
        skipped: list[Listing] = []
        for listing in self.listing():
            fault = listing.fault
            if fault is None and digests:
                fault = self._fault_of(listing.name)
            if fault is None:
                return listing, skipped
            skipped.append(replace(listing, fault=fault))
        return None, skipped

    def _fault_of(self, name: str) -> str | None:
        try:
            with self.open(name) as checkpoint:
                return next(iter(checkpoint.verify()), None)
        except CheckpointError as error:
            return str(error)

    def open(self, name: str) -> Checkpoint:
        """Opens a checkpoint by its name; no save removes it until it is closed."""
        return Checkpoint(self.storage, name)

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(what, self.storage, "", error) from error


def manifest_of(
    draft: Draft, parts: Sequence[RankPart], values: Json, world_size: int, here: Sequence[str] | None
) -> Manifest:
    """Returns the manifest of a checkpoint that consists of these parts.

    Raises:
        CheckpointError: the parts do not make up one state.
    """
    missing = sorted({*range(world_size)} - {part.rank for part in parts})
    if missing or len(parts) != world_size:
        raise CheckpointError(
            f"a checkpoint of {world_size} ranks needs one part of each; there are {len(parts)}"
            + (f", and none of rank {missing[0]}" if missing else "")
        )
    files, tensors = merged(parts)
    return Manifest(
        step=draft.step,
        sequence=draft.sequence,
        token=draft.token,
        world_size=world_size,
        written_at_s=time.time(),
        paceline=__version__,
        files=files,
        tensors=tensors,
        values=values,
        here=None if here is None else tuple(sorted(here)),
    )


def publish(storage: Storage, draft: Draft, manifest: Manifest, held: OutputFile | None) -> None:
    """Makes a checkpoint with durable files visible; it survives the loss of power when this returns."""
    text = memoryview(manifest_json.to_bytes(manifest))
    file = held if held is not None else storage.create(f"{draft.directory}/{FILE}")
    with contextlib.closing(file):
        file.write([text])
        file.commit()
        storage.sync_directory(draft.directory)
        if storage.renames:
            storage.rename(draft.directory, draft.name)
            storage.sync_directory("")
    point_to(storage, draft)
    failpoint("checkpoint.done")


def point_to(storage: Storage, draft: Draft) -> None:
    """Writes the pointer `latest`, for people and other programs; ranks that restore read the manifests instead."""
    line = memoryview(f"{draft.name}\n".encode())
    written = f"{WRITING}{LATEST}-{draft.token}" if storage.renames else LATEST
    file = storage.create(written)
    with contextlib.closing(file):
        file.write([line])
        file.commit()
    if storage.renames:
        storage.rename(written, LATEST)
    storage.sync_directory("")


def _to_keep(listings: list[Listing], keep: int) -> set[str]:
    """Returns the names of the `keep` newest intact checkpoints, and of damaged ones newer than the oldest of them."""
    whole = [listing for listing in listings if listing.fault is None][:keep]
    if not whole:
        return set()
    oldest = whole[-1].sequence or 0
    return {listing.name for listing in listings if listing in whole or (listing.sequence or 0) > oldest}


def remove(storage: Storage, name: str) -> None:
    """Removes a checkpoint so that it is never partly visible."""
    if storage.renames:
        doomed = f"{REMOVING}{name}"
        storage.remove(doomed)
        storage.rename(name, doomed)
        storage.sync_directory("")
        storage.remove(doomed)
    else:
        storage.remove(f"{name}/{FILE}")
        storage.remove(name)


def remove_left_overs(storage: Storage) -> None:
    """Removes the files that unfinished saves and removals left, unless a live process is writing them."""
    for name in storage.names():
        # In storage without renames, an unfinished checkpoint has its final name and no manifest.
        lacks_manifest = not storage.renames and is_name(name) and storage.size(f"{name}/{FILE}") is None
        is_unfinished = (name.startswith(WRITING) or lacks_manifest) and not storage.is_held(name)
        if is_unfinished or name.startswith(REMOVING):
            storage.remove(name)
