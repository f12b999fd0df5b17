"""Where one of two machines cannot connect to the other, it asks to be connected to: by a note in the store."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.store.base import Store


class Calls:
    """The notes that the ranks of one group leave for each other while it forms.

    Args:
        store: the store of the group.
        number: the group's number.
        rank: this rank.
    """

    def __init__(self, store: Store, number: int, rank: int) -> None:
        self._store, self._number, self._rank = store, number, rank

    def call(self, peer: int, why: str) -> None:
        """Asks a peer to connect to this rank, and says why this rank cannot connect to the peer."""
        self._store.set(f"{self._place(peer)}/{self._rank}", why)
        self._store.set(self._place(peer), b"")

    def callers(self, among: Iterable[int]) -> dict[int, str]:
        """Returns those of the ranks that ask this one to connect to them, with their reasons."""
        place = self._place(self._rank)
        if not self._store.check([place]):  # most of the time, one question is enough
            return {}
        return {
            peer: self._store.get(f"{place}/{peer}").decode()
            for peer in sorted(among)
            if self._store.check([f"{place}/{peer}"])
        }

    def _place(self, rank: int) -> str:
        return f"links/{self._number}/calls/{rank}"
