"""Ranks that measure at the same time tell each other by files how far they are, since each is a world of its own."""

from __future__ import annotations

import time
from pathlib import Path

_PAUSE_S = 0.01


class Meeting:
    """What the ranks of a machine have said in a directory that they share.

    Args:
        directory: the directory, which exists.
        rank: this rank's number on the machine.
        ranks: how many there are.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self.ranks = ranks

    def say(self, word: str) -> None:
        """Tells the others."""
        (self._directory / f"{word}.{self._rank}").touch()

    def all_said(self, word: str) -> bool:
        """Returns whether all have said the word."""
        return all((self._directory / f"{word}.{rank}").exists() for rank in range(self.ranks))

    def await_all(self, word: str, timeout_s: float) -> bool:
        """Says the word and waits until all have said it; returns whether they have within the time."""
        self.say(word)
        deadline = time.monotonic() + timeout_s
        while not self.all_said(word):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True
