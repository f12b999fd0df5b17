"""Root: begins, publishes, lists and removes the checkpoints in a directory, and opens the newest complete one.

A checkpoint becomes visible atomically, and only after it is durable (survives a power loss). Each of the following is
made durable before the next is written: the files of all ranks, the manifest, the directory's name, and the file
`latest`. Old checkpoints are removed last.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline import __version__
from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.local_storage import open_storage
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
    manifest_to_bytes,
    merged,
    read_file,
    read_summary,
)
from paceline.train.checkpoint.format.storage import OutputFile, Storage, check_room, fault_of_size, storage_error
from paceline.train.checkpoint.format.values import Json
from paceline.train.elastic.failpoints import failpoint

_TOKEN_NBYTES = 4
_MOST_OF_A_NAME = 4096  # bytes in the file `latest`


class Root:
    """A directory of checkpoints.

    One rank begins a checkpoint, all ranks write their parts (`write_part`), and the rank that began it publishes it:

        draft = root.begin(42)
        part = write_part(root.storage, draft, 0, pieces)
        root.publish(draft, [part], values, world_size=1)
        root.retire(keep=3)
    """

    def __init__(self, where: str | os.PathLike[str] | Storage) -> None:
        """Creates the root at a path, at an fsspec address, or in a storage. The root need not exist yet."""
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
        """Begins a checkpoint, and removes the files of interrupted saves; returns the draft for all ranks.

        Args:
            step: the training step, which becomes part of the name, or None.
            nbytes: the number of bytes that all ranks will write here, which is compared with the free space, or None.
            unique: whether to choose a name that is unique across hosts, for disks that hosts do not share. The first
                rank on every other host must then call `join`.
            sequence: the sequence number, or None to use the larger of `least_sequence` and this host's
                `next_sequence`. A given number must be at least the largest `next_sequence` on any host.
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
        """Creates the directory on this host's disk for a checkpoint that a rank on another host began; see `begin`."""
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
        """Creates the directory to which ranks write; opens and locks the manifest if the storage supports renames."""
        self.storage.make_directory("")
        self.storage.make_directory(draft.directory)
        if self.storage.renames:
            self._held[draft.token] = self.storage.create(f"{draft.directory}/{FILE}")

    def next_sequence(self) -> int:
        """Returns the sequence number of the next checkpoint, greater than that of any existing checkpoint."""
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
        """Makes a checkpoint visible after its parts have been written, and returns when it is durable.

        Args:
            parts: the results of `write_part` on all ranks.
            values: the plain values, encoded by `values.encode`.
            here: the names of the files in this directory, or None if it contains all files.

        Raises:
            CheckpointError: the parts do not form one state, or the disk failed. Earlier checkpoints are unchanged.
        """
        manifest = manifest_of(draft, parts, values, world_size, here)
        storage = self.storage
        with self._refusing("write"):
            held = self._held.pop(draft.token, None)
            with contextlib.closing(held or storage.create(f"{draft.directory}/{FILE}")) as file:
                file.write([memoryview(manifest_to_bytes(manifest))])
                file.commit()
                storage.sync_directory(draft.directory)
                if storage.renames:
                    storage.rename(draft.directory, draft.name)
                    storage.sync_directory("")
            _point_to(storage, draft)
            failpoint("checkpoint.done")
        return manifest

    def abandon(self, draft: Draft) -> None:
        """Removes the files of a failed checkpoint, ignoring errors."""
        held = self._held.pop(draft.token, None)
        if held is not None:
            held.close()
        with contextlib.suppress(OSError):
            self.storage.remove(draft.directory)

    def retire(self, keep: int) -> list[str]:
        """Removes all but the `keep` newest complete checkpoints; returns the names of the removed ones.

        The following are also kept: the checkpoint named in `latest`, checkpoints that are being read, checkpoints
        whose manifest is unreadable and may be in a newer format, damaged checkpoints newer than the oldest kept one,
        and directories that no save created. If no checkpoint is complete, none is removed.
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

    def open(self, name: str) -> Checkpoint:
        """Opens the checkpoint with this name, and protects it from removal until it is closed."""
        return Checkpoint(self.storage, name)

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(what, self.storage, "", error) from error


@dataclass(frozen=True)
class Listing:
    """A checkpoint in a root as described by its manifest, and the fault that makes it unusable, if any."""

    name: str
    step: int | None = None
    sequence: int | None = None
    token: str | None = None
    nbytes: int = 0
    fault: str | None = None


def listing_of(storage: Storage) -> list[Listing]:
    """Returns the checkpoints in a root: first those whose manifest cannot be read, then the others, newest first."""
    found = [look_at(storage, name) for name in storage.names() if is_name(name)]
    return sorted(
        found, key=lambda listing: (listing.sequence is None, listing.sequence or 0, listing.name), reverse=True
    )


def look_at(storage: Storage, name: str) -> Listing:
    """Returns the listing of one checkpoint. If no fault is listed, all files exist and have the right sizes."""
    try:
        summary = read_summary(storage, name)
        files = summary.files_here()
        faults = (fault_of_size(storage, f"{name}/{file}", entry.nbytes) for file, entry in files.items())
        fault = next(filter(None, faults), None)
    except (CheckpointError, OSError, KeyError) as error:
        return Listing(name, fault=str(error))
    nbytes = sum(file.nbytes for file in files.values())
    return Listing(name, summary.step, summary.sequence, summary.token, nbytes, fault)


def unfinished(storage: Storage) -> list[str]:
    """Returns the directories of saves that failed or are still running."""
    return sorted(name for name in storage.names() if name.startswith(WRITING))


def latest_name(storage: Storage) -> str | None:
    """Returns the checkpoint name in the file `latest`, or None if there is no such file."""
    try:
        return read_file(storage, LATEST, _MOST_OF_A_NAME).decode("utf-8", "replace").strip() or None
    except (FileNotFoundError, CheckpointDamagedError):
        return None


def open_checkpoint(where: str | os.PathLike[str]) -> Checkpoint:
    """Opens the checkpoint at a path or address, or the newest complete checkpoint if `where` is a root."""
    storage = open_storage(where)
    if storage.size(FILE) is not None:
        return Checkpoint(storage, "")
    damaged: dict[str, str] = {}
    while True:
        listings = listing_of(storage)
        name = next(
            (listing.name for listing in listings if listing.fault is None and listing.name not in damaged), None
        )
        if name is None:
            break
        try:
            return Checkpoint(storage, name)
        except CheckpointDamagedError as error:  # a concurrent save may also have removed the checkpoint
            damaged[name] = str(error)
    faults = "; ".join(f"{listing.name}: {listing.fault or damaged[listing.name]}" for listing in listings)
    raise CheckpointError(f"{storage.describe()} contains no complete checkpoint" + (f" ({faults})" if faults else ""))


def manifest_of(
    draft: Draft, parts: Sequence[RankPart], values: Json, world_size: int, here: Sequence[str] | None
) -> Manifest:
    """Returns the manifest of a checkpoint that consists of these parts."""
    missing = sorted({*range(world_size)} - {part.rank for part in parts})
    if missing or len(parts) != world_size:
        raise CheckpointError(
            f"a checkpoint of {world_size} ranks needs one part from each; there are {len(parts)}"
            + (f", and none from rank {missing[0]}" if missing else "")
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


def _point_to(storage: Storage, draft: Draft) -> None:
    """Writes a checkpoint's name to the file `latest` for users and other programs; loading does not require it."""
    written = f"{WRITING}{LATEST}-{draft.token}" if storage.renames else LATEST
    with contextlib.closing(storage.create(written)) as file:
        file.write([memoryview(f"{draft.name}\n".encode())])
        file.commit()
    if storage.renames:
        storage.rename(written, LATEST)
    storage.sync_directory("")


def _to_keep(listings: list[Listing], keep: int) -> set[str]:
    """Returns the names of the `keep` newest intact checkpoints, and of damaged ones newer than the oldest of those."""
    whole = [listing for listing in listings if listing.fault is None][:keep]
    if not whole:
        return set()
    oldest = whole[-1].sequence or 0
    return {listing.name for listing in listings if listing in whole or (listing.sequence or 0) > oldest}


def remove(storage: Storage, name: str) -> None:
    """Removes a checkpoint without ever leaving it partly visible."""
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
    """Removes files left behind by interrupted saves and removals, unless a live process is writing them."""
    for name in storage.names():
        # On storage that cannot rename files, an unfinished checkpoint has its final name but no manifest.
        lacks_manifest = not storage.renames and is_name(name) and storage.size(f"{name}/{FILE}") is None
        is_unfinished = (name.startswith(WRITING) or lacks_manifest) and not storage.is_held(name)
        if is_unfinished or name.startswith(REMOVING):
            storage.remove(name)
