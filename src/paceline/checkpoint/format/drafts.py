"""The names of checkpoints, and those of one that is being written."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

import msgspec

WRITING = ".writing-"
REMOVING = ".removing-"
LATEST = "latest"
_NAME = re.compile(r"(step|state)_\d+(\.\d+)?(-[0-9a-f]+)?")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Attributes: the `name` that it will have, the `directory` in which ranks write, the `step`, the `sequence` among
    the root's checkpoints, and a `token` that no other one has.
    """

    name: str
    directory: str
    step: int | None
    sequence: int
    token: str

    def to_bytes(self) -> bytes:
        """Returns the draft for the other ranks."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Draft:
        """Returns what `to_bytes` encoded."""
        return msgspec.json.decode(data, type=Draft)


def is_name(name: str) -> bool:
    """Returns whether a directory of this name is one that a save made; others are left alone."""
    return _NAME.fullmatch(name) is not None


def draft_of(
    step: int | None, sequence: int, token: str, taken: Container[str], *, renames: bool, is_unique: bool
) -> Draft:
    """Returns the draft of a new checkpoint.

    Args:
        step: of the training; without one, the name says the sequence.
        sequence: of the checkpoint in its root.
        token: that no other one has.
        taken: names that are in use.
        renames: whether it is written under another name first.
        is_unique: whether the name has the token, so that it is free on every host.
    """
    stem = f"state_{sequence:06d}" if step is None else f"step_{step:010d}"
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}.{number}", number + 1
    if is_unique:
        name = f"{stem}-{token}"
    directory = f"{WRITING}{name}-{token}" if renames else name
    return Draft(name, directory, step, sequence, token)
