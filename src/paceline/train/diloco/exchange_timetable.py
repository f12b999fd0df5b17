"""When each fragment's exchange begins and when its result is used: a state machine without communication or a clock.

Exchanges are numbered from 0. Exchange k is of fragment k mod `fragments`, in round k // `fragments`; a round has
`every` inner steps, over which its exchanges are spread evenly. A rank that is behind the others takes the number of
steps that they have, so that it does not fall back further in each round.

Who takes part in an exchange, when late ranks are not waited for: a state machine without communication or a clock.

One rank calls the roll for all. An exchange is held when all ranks have come to it, or when the grace window has
passed since the first of them came; then those that are there take part. A rank that has finished its training is not
waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FINISHED = -1


@dataclass(frozen=True)
class Participants:
    """Who takes part in an exchange.

    Attributes:
        takes_part: for each rank, whether it does.
        is_final: no rank has any exchange to come, since all have finished.
    """

    takes_part: tuple[bool, ...]
    is_final: bool = False


class ArrivalTracker:
    """The roll of the exchanges from `number` on, one after the other.

    Args:
        ranks: how many ranks there are.
        grace_s: how long an exchange waits after the first rank has come to it.
        number: the first exchange.
    """

    def __init__(self, ranks: int, grace_s: float, number: int = 0) -> None:
        self._grace_s = grace_s
        self.number = number
        self._offered = [number - 1] * ranks  # the latest exchange that each rank has come to
        self._has_finished = [False] * ranks
        self._first_s: dict[int, float] = {}  # when the first rank came to an exchange

    def came(self, rank: int, number: int, now_s: float) -> None:
        """Notes that a rank has come to an exchange, perhaps too late; FINISHED if it will come to no other."""
        if number == FINISHED:
            self._has_finished[rank] = True
            return
        for each in range(max(self._offered[rank] + 1, self.number), number + 1):
            self._first_s.setdefault(each, now_s)
        self._offered[rank] = max(self._offered[rank], number)

    def due_s(self) -> float | None:
        """Returns when the current exchange will be held even if nobody else comes; None if nobody has come yet."""
        first_s = self._first_s.get(self.number)
        return None if first_s is None else first_s + self._grace_s

    def call(self, now_s: float) -> Participants | None:
        """Returns who takes part in the current exchange, and goes on to the next one; None if it has to wait."""
        there = tuple(offered >= self.number for offered in self._offered)
        if not any(there):
            return Participants(there, is_final=True) if all(self._has_finished) else None
        awaits = any(not come and not over for come, over in zip(there, self._has_finished, strict=True))
        due_s = self.due_s()
        if awaits and due_s is not None and now_s < due_s:
            return None
        self._first_s.pop(self.number, None)
        self.number += 1
        return Participants(there)


def participants_after_waiting(numbers: Sequence[int]) -> Participants:
    """Returns who takes part if all ranks are waited for, from the exchange that each has come to, or FINISHED.

    Raises:
        ValueError: ranks that have not finished have come to different exchanges.

    >>> participants_after_waiting([4, FINISHED, 4])
    Participants(takes_part=(True, False, True), is_final=False)
    """
    there = tuple(number != FINISHED for number in numbers)
    if len({number for number in numbers if number != FINISHED}) > 1:
        raise ValueError(f"by rank, the exchanges are {', '.join(map(str, numbers))}")
    return Participants(there, is_final=not any(there))


@dataclass(frozen=True)
class ExchangeInterval:
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

        >>> [ExchangeInterval(every=10, fragments=4).begins(exchange) for exchange in range(6)]
        [3, 5, 8, 10, 13, 15]
        """
        earlier, fragment = divmod(exchange, self.fragments)
        return earlier * self.every - (-(fragment + 1) * self.every // self.fragments)

    def is_used(self, exchange: int) -> int:
        """Returns after how many inner steps the result of the exchange is used."""
        return self.begins(exchange) + self.delay

    def begun_after(self, steps: int) -> int:
        """Returns how many exchanges have begun after so many inner steps.

        >>> [ExchangeInterval(every=10, fragments=4).begun_after(steps) for steps in (0, 2, 3, 9, 10, 23)]
        [0, 0, 1, 3, 4, 9]
        """
        begun = steps // self.every * self.fragments
        while self.begins(begun) <= steps:
            begun += 1
        return begun


@dataclass(frozen=True)
class BeginExchange:
    """An exchange is to begin with what this rank has trained so far."""

    exchange: int


@dataclass(frozen=True)
class UseResult:
    """The result of an exchange is to be awaited and used."""

    exchange: int


@dataclass
class ExchangeTimetable:
    """Where a rank is in its training.

    Attributes:
        rhythm: how often fragments are exchanged.
        steps: the inner steps that count as done.
        begun: the number of exchanges that have begun.
        used: the number of exchanges whose results have been used; never more than `begun`.
    """

    rhythm: ExchangeInterval
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

    def due(self) -> BeginExchange | UseResult | None:
        """Returns what is to be done now; None if the next inner step is."""
        if self.used < self.begun and self.rhythm.is_used(self.used) <= self.steps:
            return UseResult(self.used)
        return BeginExchange(self.begun) if self.rhythm.begins(self.begun) <= self.steps else None

    def did(self, action: BeginExchange | UseResult) -> None:
        """Notes that what was due has been done."""
        if isinstance(action, BeginExchange):
            self.begun = action.exchange + 1
        else:
            self.used = action.exchange + 1
