"""Loads the newest whole checkpoint that is on the disk; damaged ones are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.checkpoint.choosing import chosen
from paceline.checkpoint.disks import Disks
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.loading import load_from, load_spread
from paceline.checkpoint.objects import State
from paceline.checkpoint.sources import newest_spread
from paceline.checkpoint.talking import Alone, GroupTalk
from paceline.errors import CheckpointDamagedError


@dataclass(frozen=True)
class Newest:
    """The checkpoint that was loaded.

    Attributes:
        step: its step, None if it was saved without one.
        skipped: why each newer one was not loaded, by its name.
    """

    step: int | None
    skipped: Mapping[str, str]


def load_newest(state: State, root: Root, disks: Disks | None, talk: GroupTalk | Alone) -> Newest | None:
    """Loads into `state` from the disk that all ranks share or, if there are `disks`, from those of the hosts.

    Returns:
        What was loaded; None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints and none is whole, or the newest whole one is one of other objects.
    """
    return _load_shared(state, root, talk) if disks is None else _load_spread(state, root, disks, talk)


def _load_shared(state: State, root: Root, talk: GroupTalk | Alone) -> Newest | None:
    damaged: dict[str, str] = {}
    while (name := chosen(root, talk, damaged)) is not None:
        try:
            return Newest(load_from(state, root.place.describe(name), talk).step, damaged)
        except CheckpointDamagedError as error:
            damaged[name] = str(error)
    return None


def _load_spread(state: State, root: Root, disks: Disks, talk: GroupTalk | Alone) -> Newest | None:
    damaged: dict[str, str] = {}
    while True:
        spread, skipped = newest_spread(root, disks, talk, damaged)
        if spread is None:
            return None
        try:
            return Newest(load_spread(state, root, spread, talk).step, skipped)
        except CheckpointDamagedError as error:
            damaged[spread.token] = str(error)
