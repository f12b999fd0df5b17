"""When each fragment's exchange begins and when its result is used: a state machine without communication or a clock.

Exchanges are numbered from 0. Exchange k is of fragment k mod `fragments`, in round k // `fragments`; a round has
`every` inner steps, over which its exchanges are spread evenly. A rank that is behind the others takes the number of
steps that they have, so that it does not fall back further in each round.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rhythm:
    """How often fragments are exchanged.

    Attributes:
        every: the inner steps of a round, in which each fragment is exchanged once.
        fragments: the number of fragments, at most `every`.
        delay: the inner steps between the beginning of an exchange and the use of its result, less than `every`.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def fragment(self, exchange: int) -> int:
        """Returns which fragment is exchanged."""
        return exchange % self.fragments

    def begins(self, exchange: int) -> int:
        """Returns after how many inner steps the exchange begins.

        >>> [Rhythm(every=10, fragments=4).begins(exchange) for exchange in range(6)]
        [3, 5, 8, 10, 13, 15]
        """
        earlier, fragment = divmod(exchange, self.fragments)
        return earlier * self.every - (-(fragment + 1) * self.every // self.fragments)

    def is_used(self, exchange: int) -> int:
        """Returns after how many inner steps the result of the exchange is used."""
        return self.begins(exchange) + self.delay

    def begun_after(self, steps: int) -> int:
        """Returns how many exchanges have begun after so many inner steps.

        >>> [Rhythm(every=10, fragments=4).begun_after(steps) for steps in (0, 2, 3, 9, 10, 23)]
        [0, 0, 1, 3, 4, 9]
        """
        begun = steps // self.every * self.fragments
        while self.begins(begun) <= steps:
            begun += 1
        return begun


@dataclass(frozen=True)
class Begin:
    """An exchange is to begin with what this rank has trained so far."""

    exchange: int


@dataclass(frozen=True)
class Use:
    """The result of an exchange is to be awaited and used."""

    exchange: int


@dataclass
class Course:
    """Where a rank is in its training.

    Attributes:
        rhythm: how often fragments are exchanged.
        steps: the inner steps that count as done.
        begun: the number of exchanges that have begun.
        used: the number of exchanges whose results have been used; never more than `begun`.
    """

    rhythm: Rhythm
    steps: int = 0
    begun: int = 0
    used: int = 0

    def step(self) -> None:
        """Counts an inner step."""
        self.steps += 1

    def catch_up(self, decided: int) -> None:
        """Takes note that the others have held the first `decided` exchanges, whether with this rank or without.

        A rank that has not begun the latest of them is late, and goes on with the number of steps that the others had.
        """
        if decided > self.begun:
            self.steps = max(self.steps, self.rhythm.begins(decided - 1))

    def due(self) -> Begin | Use | None:
        """Returns what is to be done now; None if the next inner step is."""
        if self.used < self.begun and self.rhythm.is_used(self.used) <= self.steps:
            return Use(self.used)
        return Begin(self.begun) if self.rhythm.begins(self.begun) <= self.steps else None

    def did(self, action: Begin | Use) -> None:
        """Notes that what was due has been done."""
        if isinstance(action, Begin):
            self.begun = action.exchange + 1
        else:
            self.used = action.exchange + 1
