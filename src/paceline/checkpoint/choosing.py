"""Which checkpoint on the disk ranks restore: the newest that is not known to be damaged."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

from paceline.checkpoint.disks import Disks
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.sources import newest_spread
from paceline.checkpoint.talking import Alone, GroupTalk
from paceline.errors import CheckpointError


def chosen(root: Root, talk: GroupTalk | Alone, damaged: dict[str, str]) -> str | None:
    """Returns the newest checkpoint that is not known to be damaged, None if there are no checkpoints at all.

    Args:
        damaged: those that are known to be, and why; rank 0 adds those that it finds.

    Raises:
        CheckpointError: there are checkpoints and none is whole; raised on every rank.
    """

    def choose() -> bytes:
        for each in root.listing():
            if each.name not in damaged and each.fault is None:
                return each.name.encode()
            damaged.setdefault(each.name, each.fault or "")
        if not damaged:
            return b""
        faults = "; ".join(map(": ".join, damaged.items()))
        raise CheckpointError(
            f"{root.place.describe()} has no whole checkpoint: {faults}. Remove what is there to begin anew"
        )

    name = heard(talk.announce(told(choose, talk.me) if talk.rank == 0 else b""))
    return name.decode() or None


def newest_sequence(root: Root, disks: Disks | None, talk: GroupTalk | Alone) -> int:
    """Returns the sequence of the newest whole checkpoint on the disk, 0 if there is none or the disk cannot be read.

    Args:
        disks: those of the hosts; None if all ranks share one.
    """
    with contextlib.suppress(CheckpointError):
        if disks is not None:
            spread, _ = newest_spread(root, disks, talk, {})
            return 0 if spread is None else spread.sequence

        def look() -> bytes:
            newest, _ = root.newest_whole()
            return b"0" if newest is None else str(newest.sequence).encode()

        return int(heard(talk.announce(told(look, talk.me) if talk.rank == 0 else b"")))
    return 0


def say_skipped(damaged: Mapping[str, str], talk: GroupTalk | Alone) -> None:
    """Says on stderr which checkpoints were skipped and why, on rank 0."""
    if talk.rank == 0:
        for name, fault in damaged.items():
            sys.stderr.write(f"paceline: skipped the checkpoint {name}: {fault}\n")
