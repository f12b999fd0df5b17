"""Makes a checkpoint visible whose parts have been written: on the one disk, or on each host's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.checkpoint.disks import Disks, abandon
from paceline.checkpoint.format.manifest import Part
from paceline.checkpoint.format.manifest_json import part_from_bytes
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.preparing import Prepared
from paceline.checkpoint.talking import Talk


def publish_on_one(root: Root, prepared: Prepared, outcome: bytes, keep: int, talk: Talk) -> None:
    """Has rank 0 make the checkpoint visible on the disk that all ranks share.

    Args:
        outcome: what this rank has written, or why it could not.

    Raises:
        CheckpointError: a rank failed; raised on every rank.
    """
    if talk.rank > 0:
        talk.collect(outcome)
        heard(talk.announce(b""))
        return
    is_published = False
    try:
        verdict = told(lambda: _published(root, prepared, talk.collect(outcome), talk.size), talk.me)
        is_published = verdict[:1] == b"+"
        heard(talk.announce(verdict))
    finally:
        if not is_published:
            root.abandon(prepared.draft)
    root.retire(keep)


def publish_on_each(
    root: Root, prepared: Prepared, disks: Disks, outcome: bytes, keep: int, talks: tuple[Talk, Talk]
) -> None:
    """Has the first rank of each disk make the checkpoint visible there, once all have been told all parts.

    A checkpoint that becomes visible on some disks only does not count, since files of it are on none.

    Raises:
        CheckpointError: a rank failed; raised on every rank.
    """
    first, second = talks
    is_published = False
    try:
        everyone = first.collect(outcome)
        text = first.announce(told(lambda: _together(everyone), first.me) if first.rank == 0 else b"")
        mine = told(lambda: _published_here(root, prepared, disks, text, first.size), first.me)
        is_published = mine[:1] == b"+"
        answers = second.collect(mine)
        failed = [each for each in answers if each[:1] != b"+"]
        heard(second.announce(b"" if second.rank else [*failed, answers[0]][0]))
    finally:
        if not is_published:
            abandon(root, prepared.draft, disks, first.rank)
    if disks.is_first:
        root.retire(keep)


def _together(everyone: Sequence[bytes]) -> bytes:
    return json.dumps([heard(each).decode() for each in everyone]).encode()


def _published(root: Root, prepared: Prepared, everyone: Sequence[bytes], size: int) -> bytes:
    parts, values = _parts_of([heard(each) for each in everyone])
    root.publish(prepared.draft, parts, values, world_size=size)
    return b""


def _published_here(root: Root, prepared: Prepared, disks: Disks, text: bytes, size: int) -> bytes:
    parts, values = _parts_of([each.encode() for each in json.loads(heard(text))])
    if disks.is_first:
        here = [file for rank in disks.sharers(disks.rank) for file in parts[rank].files]
        root.publish(prepared.draft, parts, values, world_size=size, here=here)
    return b""


def _parts_of(everyone: Sequence[bytes]) -> tuple[list[Part], dict[str, Any]]:
    """Returns what all ranks wrote, and their values; where several have a value, that of the first one counts."""
    parts: list[Part] = []
    values: dict[str, Any] = {}
    for each in reversed(everyone):
        part, own = json.loads(each)
        parts.append(part_from_bytes(part.encode()))
        values |= own
    return parts[::-1], values
