"""Where ranks read a checkpoint whose files are on the disks of several hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from paceline.checkpoint.disks import Disks
from paceline.checkpoint.format.checkpoint import Checkpoint
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.format.manifest_json import from_bytes, to_bytes
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.talking import Alone, GroupTalk
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class Spread:
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


class Elsewhere:
    """A checkpoint of which this rank's disk has nothing."""

    nbytes_read = 0

    def __init__(self, manifest: Manifest, where: str) -> None:
        self.manifest, self._where = manifest, where

    def describe(self) -> str:
        """Returns where it would be."""
        return self._where


def newest_spread(
    root: Root, disks: Disks, talk: GroupTalk | Alone, damaged: Mapping[str, str]
) -> tuple[Spread | None, dict[str, str]]:
    """Returns the newest checkpoint all of whose files some rank sees, and why others were skipped, by token.

    Args:
        damaged: checkpoints that are known to be damaged, by token, and why.

    Raises:
        CheckpointError: there are checkpoints and none is whole; raised on every rank.
    """

    def listed() -> bytes:
        own = root.listing() if disks.is_first else []
        return json.dumps([[each.sequence, each.token, each.name, each.fault] for each in own]).encode()

    everyone = [json.loads(heard(each)) for each in talk.exchange(told(listed, talk.me))]
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
    root: Root, disks: Disks, talk: GroupTalk | Alone, which: tuple[int, str], names: Mapping[int, str]
) -> tuple[Spread, str | None]:
    """Returns a checkpoint, given its sequence and token, and a file of it that no rank sees."""

    def known() -> bytes:
        if talk.rank not in names:
            return b"[[], []]"
        with root.open(names[talk.rank]) as opened:
            return json.dumps([sorted(opened.manifest.files_here()), sorted(opened.manifest.files)]).encode()

    everyone = [json.loads(heard(each)) for each in talk.exchange(told(known, talk.me))]
    holders: dict[str, list[int]] = {}
    for rank, (here, _) in enumerate(everyone):
        for file in here:
            holders.setdefault(file, []).extend(disks.sharers(rank))
    missing = [file for _, files in everyone for file in files if file not in holders]
    describer = -1 if names.keys() == set(disks.of) else min(names)
    sequence, token = which
    spread = Spread(token, sequence, names.get(disks.of[talk.rank]), holders, describer)
    return spread, missing[0] if missing else None


@contextmanager
def opened(root: Root, spread: Spread, talk: GroupTalk | Alone) -> Iterator[Checkpoint | Elsewhere]:
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

        answers = [heard(each) for each in talk.exchange(told(open_it, talk.me))]
        if here:
            yield here[0]
        else:
            text = answers[spread.describer]
            manifest = from_bytes(text, f"the manifest of rank {spread.describer} of the group")
            yield Elsewhere(manifest, f"{root.place.describe()} on other hosts")
