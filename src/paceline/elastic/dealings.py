"""To whom each batch was dealt out, on which the members agree even if they are in different views when it begins.

A member may begin a batch, and another one of the same view may lose its connections before it does. The latter then
begins the batch in a later view, and must not deal it out anew. So members tell each other, when they enter a view,
of the latest batch that they know to have begun, and whoever has not begun it yet takes over how it was dealt out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class Dealt(msgspec.Struct, frozen=True, array_like=True):
    """A batch that was dealt out: the round that it begins with, and the members that have shares in it, by rank."""

    round: int
    members: tuple[str, ...]


NOTHING_DEALT = Dealt(-1, ())


@dataclass(frozen=True)
class ViewChange:
    """Who trains from this batch on.

    Attributes:
        workers: the number of workers.
        came: the names of those that were not there in the batch before.
        went: the names of those that are not there any more.
    """

    workers: int
    came: tuple[str, ...]
    went: tuple[str, ...]


class Dealings:
    """What one member knows of the batches that were dealt out."""

    def __init__(self) -> None:
        self.latest = NOTHING_DEALT
        self._told: tuple[str, ...] = ()  # the members at the latest batch that this member has begun itself

    def learn(self, others: Iterable[Dealt], *, is_new: bool) -> None:
        """Takes what the members of a view know; a new member has taken part in all that was dealt out before."""
        self.latest = max([self.latest, *others], key=lambda dealt: dealt.round)
        if is_new:
            self._told = self.latest.members

    def begin(self, round_number: int, members: tuple[str, ...]) -> ViewChange | None:
        """Begins a batch, and deals it out to `members` unless that was done; returns the change since the last one.

        >>> early, late = Dealings(), Dealings()
        >>> early.begin(0, ("a", "b", "c"))
        ViewChange(workers=3, came=('a', 'b', 'c'), went=())
        >>> late.learn([early.latest], is_new=False)
        >>> late.begin(0, ("a", "b")) == ViewChange(3, ("a", "b", "c"), ())
        True
        """
        if self.latest.round < round_number:
            self.latest = Dealt(round_number, members)
        before, now = self._told, self.latest.members
        self._told = now
        if before == now:
            return None
        came = tuple(name for name in now if name not in before)
        return ViewChange(len(now), came, tuple(name for name in before if name not in now))
