"""A directory of checkpoints: begins, publishes and removes them, and finds the newest whole one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.checkpoint.format import saving
from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.checkpoint.format.drafts import Draft, draft_of
from paceline.checkpoint.format.manifest import Manifest, Part
from paceline.checkpoint.format.places import OutputFile, Place, place_at
from paceline.checkpoint.format.reading import Listing, listing_of
from paceline.checkpoint.format.refusals import check_room, could_not
from paceline.checkpoint.format.values import Json
from paceline.errors import CheckpointError

_TOKEN_NBYTES = 4


class Root:
    """A directory of checkpoints.

    One rank begins a checkpoint, all write their parts (`parts.write_part`), and the rank that began it publishes it:

        draft = root.begin(42)
        part = write_part(root.place, draft, 0, pieces)
        root.publish(draft, [part], values, world_size=1)
        root.retire(keep=3)
    """

    def __init__(self, where: str | os.PathLike[str] | Place) -> None:
        """Takes a path, an address for fsspec, or a place. Nothing need be there yet."""
        self.place: Place = place_at(where) if isinstance(where, (str, os.PathLike)) else where
        self._held: dict[str, OutputFile | None] = {}

    def begin(
        self,
        step: int | None = None,
        *,
        nbytes: int | None = None,
        unique: bool = False,
        sequence: int | None = None,
        least_sequence: int = 0,
    ) -> Draft:
        """Makes room for a checkpoint and removes what dead saves left; returns what the other ranks need to know.

        Args:
            step: of the training; it becomes part of the name.
            nbytes: that all ranks together will write here, if it is known, to compare with the free space.
            unique: makes a name that is free on every host, for disks that hosts do not share; the first rank of every
                other host then calls `join`.
            sequence: of the checkpoint, at least the greatest `next_sequence` of all hosts (default: that of this one).
            least_sequence: what the default is at least.

        Raises:
            CheckpointError: the directory cannot be made or has too little room.
        """
        with self._refusing("prepare"):
            saving.remove_left_overs(self.place)
            if nbytes is not None:
                check_room(self.place, nbytes)
            draft = draft_of(
                step,
                max(least_sequence, self.next_sequence()) if sequence is None else sequence,
                secrets.token_hex(_TOKEN_NBYTES),
                self.place.names(),
                renames=self.place.renames,
                is_unique=unique,
            )
            self._held[draft.token] = saving.prepare(self.place, draft)
        return draft

    def join(self, draft: Draft, *, nbytes: int | None = None) -> None:
        """Makes the directory of a checkpoint that another host's rank began, on a disk of this host; see `begin`."""
        with self._refusing("prepare"):
            saving.remove_left_overs(self.place)
            if nbytes is not None:
                check_room(self.place, nbytes)
            self._held[draft.token] = saving.prepare(self.place, draft)

    def next_sequence(self) -> int:
        """Returns the number of the next checkpoint, greater than those of all that are here."""
        return 1 + max((each.sequence or 0 for each in self.listing()), default=0)

    def publish(
        self, draft: Draft, parts: Sequence[Part], values: Json, *, world_size: int, here: Sequence[str] | None = None
    ) -> Manifest:
        """Makes a checkpoint visible, all of whose parts are written; it survives the loss of power when this returns.

        Args:
            draft: from `begin`.
            parts: what the ranks wrote, from `write_part` on each.
            values: plain values and their structure, from `values.encode`.
            world_size: the number of ranks that wrote.
            here: the files that this directory has, if hosts do not share it (default: all).

        Raises:
            CheckpointError: the parts do not make up one state, or the disk refused; those from before are untouched.
        """
        manifest = saving.manifest_of(draft, parts, values, world_size, here)
        with self._refusing("write"):
            saving.publish(self.place, draft, manifest, self._held.pop(draft.token, None))
        return manifest

    def abandon(self, draft: Draft) -> None:
        """Removes what was written of a checkpoint that failed; does nothing about what it cannot remove."""
        held = self._held.pop(draft.token, None)
        if held is not None:
            held.close()
        with contextlib.suppress(OSError):
            self.place.remove(draft.directory)

    def retire(self, keep: int) -> list[str]:
        """Removes all but the `keep` newest whole checkpoints; returns the names of those that were removed.

        It leaves the one that `latest` names, those that are being read, those whose manifest it cannot read, and
        directories that no save made.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        with self._refusing("remove old checkpoints in"):
            return saving.retire(self.place, keep)

    def listing(self) -> list[Listing]:
        """Returns the checkpoints: first those whose manifest cannot be read, then those that were saved last.

        Those without a fault have all their files, with the right sizes.
        """
        return listing_of(self.place)

    def newest_whole(self, *, digests: bool = False) -> tuple[Listing | None, list[Listing]]:
        """Returns the newest checkpoint without a fault, and those that were skipped, with their faults.

        Args:
            digests: whether to read all files and compare them with their digests, instead of their sizes only.
        """
        skipped: list[Listing] = []
        for each in self.listing():
            fault = each.fault
            if fault is None and digests:
                fault = self._fault_of(each.name)
            if fault is None:
                return each, skipped
            skipped.append(replace(each, fault=fault))
        return None, skipped

    def _fault_of(self, name: str) -> str | None:
        try:
            with self.open(name) as checkpoint:
                return next(iter(checkpoint.verify()), None)
        except CheckpointError as error:
            return str(error)

    def open(self, name: str) -> Checkpoint:
        """Opens a checkpoint by its name; it is not removed until it is closed."""
        return Checkpoint(self.place, name)

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise could_not(what, self.place, "", error) from error
