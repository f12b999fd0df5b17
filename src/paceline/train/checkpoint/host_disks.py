"""Checkpoints on disks that are not shared. Each host stores its own ranks' files and a manifest of all files."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.manifest import WRITING, Draft, Manifest, manifest_from_bytes, manifest_to_bytes
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.rank_channel import CollectiveChannel, exchanged, result_of_first, results_of_all


@dataclass(frozen=True)
class Disks:
    """The disks that the ranks use. `of` has, for each rank, the first of the ranks that use the same directory."""

    of: tuple[int, ...]
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank that uses its directory, and therefore publishes checkpoints there."""
        return self.of[self.rank] == self.rank

    def sharers(self, rank: int) -> list[int]:
        """Returns the ranks that use the same directory as `rank`, including `rank`."""
        return [other for other, first in enumerate(self.of) if first == self.of[rank]]


def found_disks(root: Root, channel: CollectiveChannel) -> Disks:
    """Finds the ranks that use the same directory. Each rank creates a file and looks for the files of other ranks."""
    storage = root.storage
    if not storage.renames:
        raise ValueError(
            f"shared=False is for disks that hosts do not share; {storage.describe()} is an address, which all hosts "
            "can reach"
        )
    token = channel.broadcast(secrets.token_hex(4).encode() if channel.rank == 0 else b"").decode()
    names = [f"{WRITING}rank-{token}-{rank}" for rank in range(channel.size)]

    def create() -> None:
        storage.make_directory("")
        with contextlib.closing(storage.create(names[channel.rank])) as file:
            file.commit()

    def first_sharer() -> int:
        found = set(storage.names())
        return next(rank for rank, name in enumerate(names) if name in found)

    try:
        results_of_all(create, channel)
        firsts = exchanged(first_sharer, int, channel)
    finally:
        with contextlib.suppress(OSError):
            storage.remove(names[channel.rank])
    return Disks(tuple(firsts), channel.rank)


def begin(
    root: Root,
    step: int | None,
    nbytes: Sequence[int],
    disks: Disks | None,
    channel: CollectiveChannel,
    least_sequence: int = 0,
) -> Draft:
    """Begins a checkpoint on every disk: rank 0 creates the draft, and the first rank on every other disk joins it.

    Args:
        nbytes: the number of bytes that each rank will write.
        disks: the disks of the hosts, or None if all ranks share one.
        least_sequence: the smallest sequence number that the checkpoint may have.
    """
    if disks is None:
        return _draft_of_first(lambda: root.begin(step, nbytes=sum(nbytes), least_sequence=least_sequence), channel)
    nbytes_here = sum(nbytes[rank] for rank in disks.sharers(disks.rank))

    def next_sequence() -> int:
        return max(least_sequence, root.next_sequence() if disks.is_first else 0)

    sequence = max(exchanged(next_sequence, int, channel))
    draft = _draft_of_first(lambda: root.begin(step, nbytes=nbytes_here, unique=True, sequence=sequence), channel)

    def join() -> None:
        if disks.is_first and channel.rank > 0:
            root.join(draft, nbytes=nbytes_here)

    try:
        results_of_all(join, channel)
    except CheckpointError:
        abandon(root, draft, disks, channel.rank)
        raise
    return draft


def _draft_of_first(begin: Callable[[], Draft], channel: CollectiveChannel) -> Draft:
    return Draft.from_bytes(result_of_first(lambda: begin().to_bytes(), channel))


def abandon(root: Root, draft: Draft, disks: Disks | None, rank: int) -> None:
    """Removes a failed checkpoint from this rank's disk, if this rank publishes checkpoints there."""
    if rank == 0 if disks is None else disks.is_first:
        root.abandon(draft)


_ListedCheckpoint = tuple[int | None, str | None, str, str | None]
"""The sequence, token, name and fault of a checkpoint on a disk."""


@dataclass(frozen=True)
class SpreadCheckpoint:
    """A checkpoint whose files are on several disks. Each file is accessible to at least one rank.

    Attributes:
        name: the checkpoint's name on this rank's disk, or None if no part of it is on that disk.
        holders: for each file, the ranks that can read it.
        describer: the first rank whose disk has the checkpoint's manifest, or -1 if every disk has it.
    """

    token: str
    sequence: int
    name: str | None
    holders: Mapping[str, Sequence[int]]
    describer: int


class AbsentCheckpoint:
    """A checkpoint that has no part on this rank's disk."""

    nbytes_read = 0

    def __init__(self, manifest: Manifest, where: str) -> None:
        self.manifest, self._where = manifest, where

    def describe(self) -> str:
        """Returns a description of the location, for error messages."""
        return self._where


def newest_spread(
    root: Root, disks: Disks, channel: CollectiveChannel, damaged: Mapping[str, str]
) -> tuple[SpreadCheckpoint | None, dict[str, str]]:
    """Returns the newest checkpoint whose files can all be read, and the reasons why newer ones were skipped, by token.

    `damaged` contains the faults of checkpoints that are known to be damaged, by token. If there are checkpoints but
    none is complete, CheckpointError is raised on every rank.
    """

    def listed() -> list[_ListedCheckpoint]:
        own = root.listing() if disks.is_first else []
        return [(entry.sequence, entry.token, entry.name, entry.fault) for entry in own]

    from_all = exchanged(listed, list[_ListedCheckpoint], channel)
    entries = [(rank, *entry) for rank, own in enumerate(from_all) for entry in own]
    skipped = {token or name: fault for _, _, token, name, fault in entries if fault is not None}
    skipped.update(damaged)
    candidates = {
        (sequence, token)
        for _, sequence, token, _, fault in entries
        if fault is None and sequence is not None and token is not None
    }
    for sequence, token in sorted(candidates, reverse=True):
        if token not in damaged:
            names = {rank: name for rank, _, its, name, fault in entries if its == token and fault is None}
            spread, missing = _spread(root, disks, channel, (sequence, token), names)
            if missing is None:
                return spread, skipped
            skipped[token] = f"{missing} is on no disk that these ranks can access"
    if not skipped:
        return None, {}
    raise CheckpointError(
        f"{root.storage.describe()} contains no complete checkpoint on the disks of these ranks: "
        f"{'; '.join(map(': '.join, skipped.items()))}. Start on the hosts that have them, or remove what is there"
    )


def _spread(
    root: Root, disks: Disks, channel: CollectiveChannel, which: tuple[int, str], names: Mapping[int, str]
) -> tuple[SpreadCheckpoint, str | None]:
    """Returns the checkpoint with a given sequence and token, and the name of a file that no rank can read, if any."""

    def files() -> tuple[list[str], list[str]]:
        if channel.rank not in names:
            return [], []
        with root.open(names[channel.rank]) as opened:
            return sorted(opened.manifest.files_here()), sorted(opened.manifest.files)

    from_all = exchanged(files, tuple[list[str], list[str]], channel)
    holders: dict[str, list[int]] = {}
    for rank, (files_here, _) in enumerate(from_all):
        for file in files_here:
            holders.setdefault(file, []).extend(disks.sharers(rank))
    missing = [file for _, all_files in from_all for file in all_files if file not in holders]
    describer = -1 if names.keys() == set(disks.of) else min(names)
    sequence, token = which
    spread = SpreadCheckpoint(token, sequence, names.get(disks.of[channel.rank]), holders, describer)
    return spread, missing[0] if missing else None


@contextmanager
def open_spread(
    root: Root, spread: SpreadCheckpoint, channel: CollectiveChannel
) -> Iterator[Checkpoint | AbsentCheckpoint]:
    """Opens the checkpoint on this rank's disk for the duration of a `with` block; every rank must call this."""
    with ExitStack() as closing:
        opened: list[Checkpoint] = []

        def open_it() -> bytes:
            if spread.name is not None:
                opened.append(closing.enter_context(root.open(spread.name)))
            return manifest_to_bytes(opened[0].manifest) if opened and channel.rank == spread.describer else b""

        answers = results_of_all(open_it, channel)
        if opened:
            yield opened[0]
        else:
            manifest = manifest_from_bytes(
                answers[spread.describer], f"the manifest of rank {spread.describer} of the group"
            )
            yield AbsentCheckpoint(manifest, f"{root.storage.describe()} on other hosts")
