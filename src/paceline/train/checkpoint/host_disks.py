"""Which ranks see the same directory, where hosts have disks of their own.

Where ranks read a checkpoint whose files are on the disks of several hosts.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.manifest import WRITING, Draft, Manifest
from paceline.train.checkpoint.format.manifest_json import from_bytes, to_bytes
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.storage import Storage
from paceline.train.checkpoint.rank_channel import GroupChannel, SingleRank, decode_result, encode_result


@dataclass(frozen=True)
class Disks:
    """The disks that the ranks see.

    Attributes:
        of: for each rank the first of the ranks that see the same directory as it does.
        rank: this rank.
    """

    of: tuple[int, ...]
    rank: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank that sees its directory, which makes checkpoints visible there."""
        return self.of[self.rank] == self.rank

    def sharers(self, rank: int) -> list[int]:
        """Returns the ranks that see the same directory as `rank` does."""
        return [each for each, first in enumerate(self.of) if first == self.of[rank]]


def found_disks(root: Root, talk: GroupChannel | SingleRank) -> Disks:
    """Finds out which ranks see the same directory: each leaves a file there and looks for those of the others.

    Raises:
        CheckpointError: a rank cannot write to its directory; raised on every rank.
        ValueError: the place is an address that all hosts reach.
    """
    _require_local(root.place)
    token = talk.announce(secrets.token_hex(4).encode() if talk.rank == 0 else b"").decode()
    names = [f"{WRITING}rank-{token}-{rank}" for rank in range(talk.size)]

    def leave() -> bytes:
        root.place.make_directory("")
        with contextlib.closing(root.place.create(names[talk.rank])) as file:
            file.commit()
        return b""

    def look() -> bytes:
        there = set(root.place.names())
        return json.dumps([rank for rank, name in enumerate(names) if name in there]).encode()

    try:
        _all_well(talk, encode_result(leave, talk.me))
        seen = [json.loads(decode_result(each)) for each in talk.exchange(encode_result(look, talk.me))]
    finally:
        with contextlib.suppress(OSError):
            root.place.remove(names[talk.rank])
    return Disks(tuple(min(each) for each in seen), talk.rank)


def begin(
    root: Root,
    step: int | None,
    nbytes: Sequence[int],
    disks: Disks,
    talk: GroupChannel | SingleRank,
    least_sequence: int = 0,
) -> Draft:
    """Returns the draft that rank 0 begins on its disk and that the first rank of each other disk joins there.

    Args:
        nbytes: what each rank will write.
        least_sequence: of the checkpoint.

    Raises:
        CheckpointError: one of them could not; raised on every rank.
    """
    here = sum(nbytes[rank] for rank in disks.sharers(disks.rank))

    def latest() -> bytes:
        return str(max(least_sequence, root.next_sequence() if disks.is_first else 0)).encode()

    sequence = max(int(decode_result(each)) for each in talk.exchange(encode_result(latest, talk.me)))
    answer = b""
    if talk.rank == 0:
        answer = encode_result(
            lambda: root.begin(step, nbytes=here, unique=True, sequence=sequence).to_bytes(), talk.me
        )
    draft = Draft.from_bytes(decode_result(talk.announce(answer)))

    def join() -> bytes:
        if disks.is_first and talk.rank > 0:
            root.join(draft, nbytes=here)
        return b""

    try:
        _all_well(talk, encode_result(join, talk.me))
    except CheckpointError:
        abandon(root, draft, disks, talk.rank)
        raise
    return draft


def abandon(root: Root, draft: Draft, disks: Disks | None, rank: int) -> None:
    """Removes what the disk has of a checkpoint that failed, if this is the rank that makes checkpoints visible there.

    Args:
        disks: those of the hosts; None if all ranks share one.
    """
    if rank == 0 if disks is None else disks.is_first:
        root.abandon(draft)


def _require_local(place: Storage) -> None:
    if not place.renames:
        raise ValueError(
            f"shared=False is for disks that hosts do not share; {place.describe()} is an address, which all "
            "hosts reach"
        )


def _all_well(talk: GroupChannel | SingleRank, outcome: bytes) -> None:
    for each in talk.exchange(outcome):
        decode_result(each)


@dataclass(frozen=True)
class SpreadCheckpoint:
    """A checkpoint whose files are on several disks, all of which some rank sees.

    Attributes:
        token: it is the same on all disks.
        sequence: the number that grows with each checkpoint.
        name: what it is called on this rank's disk; None if that has nothing of it.
        holders: for each file the ranks that see it.
        describer: the first rank whose disk has a manifest of it, if other disks have none; otherwise -1.
    """

    token: str
    sequence: int
    name: str | None
    holders: Mapping[str, Sequence[int]]
    describer: int


class AbsentCheckpoint:
    """A checkpoint of which this rank's disk has nothing."""

    nbytes_read = 0

    def __init__(self, manifest: Manifest, where: str) -> None:
        self.manifest, self._where = manifest, where

    def describe(self) -> str:
        """Returns where it would be."""
        return self._where


def newest_spread(
    root: Root, disks: Disks, talk: GroupChannel | SingleRank, damaged: Mapping[str, str]
) -> tuple[SpreadCheckpoint | None, dict[str, str]]:
    """Returns the newest checkpoint all of whose files some rank sees, and why others were skipped, by token.

    Args:
        damaged: checkpoints that are known to be damaged, by token, and why.

    Raises:
        CheckpointError: there are checkpoints and none is whole; raised on every rank.
    """

    def listed() -> bytes:
        own = root.listing() if disks.is_first else []
        return json.dumps([[each.sequence, each.token, each.name, each.fault] for each in own]).encode()

    everyone = [json.loads(decode_result(each)) for each in talk.exchange(encode_result(listed, talk.me))]
    entries = [(rank, *each) for rank, own in enumerate(everyone) for each in own]
    skipped = {token or name: fault for _, _, token, name, fault in entries if fault is not None}
    skipped.update(damaged)
    whole_here = {(sequence, token) for _, sequence, token, _, fault in entries if fault is None}
    for sequence, token in sorted(whole_here, reverse=True):
        if token not in damaged:
            names = {rank: name for rank, _, its, name, fault in entries if its == token and fault is None}
            spread, missing = _spread(root, disks, talk, (sequence, token), names)
            if missing is None:
                return spread, skipped
            skipped[token] = f"{missing} is on no disk that these ranks see"
    if not skipped:
        return None, {}
    raise CheckpointError(
        f"{root.place.describe()} has no whole checkpoint on the disks of these ranks: "
        f"{'; '.join(map(': '.join, skipped.items()))}. Start on the hosts that have them, or remove what is there"
    )


def _spread(
    root: Root, disks: Disks, talk: GroupChannel | SingleRank, which: tuple[int, str], names: Mapping[int, str]
) -> tuple[SpreadCheckpoint, str | None]:
    """Returns a checkpoint, given its sequence and token, and a file of it that no rank sees."""

    def known() -> bytes:
        if talk.rank not in names:
            return b"[[], []]"
        with root.open(names[talk.rank]) as opened:
            return json.dumps([sorted(opened.manifest.files_here()), sorted(opened.manifest.files)]).encode()

    everyone = [json.loads(decode_result(each)) for each in talk.exchange(encode_result(known, talk.me))]
    holders: dict[str, list[int]] = {}
    for rank, (here, _) in enumerate(everyone):
        for file in here:
            holders.setdefault(file, []).extend(disks.sharers(rank))
    missing = [file for _, files in everyone for file in files if file not in holders]
    describer = -1 if names.keys() == set(disks.of) else min(names)
    sequence, token = which
    spread = SpreadCheckpoint(token, sequence, names.get(disks.of[talk.rank]), holders, describer)
    return spread, missing[0] if missing else None


@contextmanager
def open_spread(
    root: Root, spread: SpreadCheckpoint, talk: GroupChannel | SingleRank
) -> Iterator[Checkpoint | AbsentCheckpoint]:
    """Returns a context with the checkpoint as this rank sees it; every rank calls this.

    Raises:
        CheckpointError: a rank could not open it; raised on every rank.
    """
    with ExitStack() as closing:
        here: list[Checkpoint] = []

        def open_it() -> bytes:
            if spread.name is not None:
                here.append(closing.enter_context(root.open(spread.name)))
            return to_bytes(here[0].manifest) if here and talk.rank == spread.describer else b""

        answers = [decode_result(each) for each in talk.exchange(encode_result(open_it, talk.me))]
        if here:
            yield here[0]
        else:
            text = answers[spread.describer]
            manifest = from_bytes(text, f"the manifest of rank {spread.describer} of the group")
            yield AbsentCheckpoint(manifest, f"{root.place.describe()} on other hosts")
