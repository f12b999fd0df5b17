"""Which ranks see the same directory, where hosts have disks of their own."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoint.format.drafts import WRITING, Draft
from paceline.checkpoint.format.places import Place
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.talking import Alone, GroupTalk
from paceline.errors import CheckpointError


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


def found_disks(root: Root, talk: GroupTalk | Alone) -> Disks:
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
        _all_well(talk, told(leave, talk.me))
        seen = [json.loads(heard(each)) for each in talk.exchange(told(look, talk.me))]
    finally:
        with contextlib.suppress(OSError):
            root.place.remove(names[talk.rank])
    return Disks(tuple(min(each) for each in seen), talk.rank)


def begin(
    root: Root,
    step: int | None,
    nbytes: Sequence[int],
    disks: Disks,
    talk: GroupTalk | Alone,
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

    sequence = max(int(heard(each)) for each in talk.exchange(told(latest, talk.me)))
    answer = b""
    if talk.rank == 0:
        answer = told(lambda: root.begin(step, nbytes=here, unique=True, sequence=sequence).to_bytes(), talk.me)
    draft = Draft.from_bytes(heard(talk.announce(answer)))

    def join() -> bytes:
        if disks.is_first and talk.rank > 0:
            root.join(draft, nbytes=here)
        return b""

    try:
        _all_well(talk, told(join, talk.me))
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


def _require_local(place: Place) -> None:
    if not place.renames:
        raise ValueError(
            f"shared=False is for disks that hosts do not share; {place.describe()} is an address, which all "
            "hosts reach"
        )


def _all_well(talk: GroupTalk | Alone, outcome: bytes) -> None:
    for each in talk.exchange(outcome):
        heard(each)
