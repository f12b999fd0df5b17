"""What was found in a file, and what became of it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.migrate.names import Way

MARK = "TODO(paceline): "  # begins what is written into the user's file where something is left to do
_WIDTH = 100


@dataclass(frozen=True)
class Place:
    """One place of a program that concerns distributed training.

    Attributes:
        line: its line in the file as it was, from 1.
        what: what is there, such as "torch.distributed.all_reduce".
        reason: why the program needs an edit there that could not be made; None if the place comes over.
        note: what is worth knowing about a place that comes over.
    """

    line: int
    what: str
    reason: str | None = None
    note: str | None = None

    @property
    def comes_over(self) -> bool:
        """Whether nothing is left to do here."""
        return self.reason is None


@dataclass(frozen=True)
class Choice:
    """The way by which a program comes over, and why it keeps torch.distributed; empty if it does not."""

    way: Way
    reason: str = ""


@dataclass(frozen=True)
class Migrated:
    """A file's new text, and the places that were found in it, in the order of their lines."""

    text: str
    places: tuple[Place, ...] = ()


def comment_lines(reason: str, indent: int = 0) -> list[str]:
    """Returns the lines of the comment, without indentation, that tells the user what is left to do."""
    width = max(40, _WIDTH - indent)
    return textwrap.wrap(MARK + reason, width, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


def score(places: Sequence[Place]) -> tuple[int, int]:
    """Returns how many of the places come over, and how many there are."""
    return sum(each.comes_over for each in places), len(places)
