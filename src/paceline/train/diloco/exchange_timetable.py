"""Timing and participants of exchanges, as two state machines without communication or a clock.

`ExchangeTimetable` schedules the beginning of each fragment's exchange and the use of its result. Exchanges count from
0. Exchange k is of fragment k mod `fragments`, in round k // `fragments`. A round has `every` inner steps, over which
its exchanges are spread evenly. A late rank adopts the step count of the others; otherwise it would fall further behind
in each round.

`ArrivalTracker` selects the participants if exchanges do not wait for late ranks; one rank runs it for all. An exchange
takes place when all ranks have arrived, or when the grace window after the first arrival has passed. The ranks that
have arrived by then participate. Ranks that have finished their training are not expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import or_

FINISHED = -1


@dataclass(frozen=True)
class ExchangeInterval:
    """The frequency of exchanges.

    Attributes:
        every: the number of inner steps of a round, in which each fragment is exchanged once.
        fragments: the number of fragments, at most `every`.
        delay: the number of inner steps from the beginning of an exchange to the use of its result, less than `every`.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def fragment(self, exchange: int) -> int:
        """Returns the fragment that is exchanged."""
        return exchange % self.fragments

    def begins(self, exchange: int) -> int:
        """Returns the number of inner steps after which the exchange begins.

        >>> [ExchangeInterval(every=10, fragments=4).begins(exchange) for exchange in range(6)]
        [3, 5, 8, 10, 13, 15]
        """
        earlier, fragment = divmod(exchange, self.fragments)
        return earlier * self.every - (-(fragment + 1) * self.every // self.fragments)

    def is_used(self, exchange: int) -> int:
        """Returns the number of inner steps after which the result of the exchange is used."""
        return self.begins(exchange) + self.delay

    def begun_after(self, steps: int) -> int:
        """Returns the number of exchanges that have begun after `steps` inner steps.

        >>> [ExchangeInterval(every=10, fragments=4).begun_after(steps) for steps in (0, 2, 3, 9, 10, 23)]
        [0, 0, 1, 3, 4, 9]
        """
        begun = steps // self.every * self.fragments
        while self.begins(begun) <= steps:
            begun += 1
        return begun


@dataclass(frozen=True)
class BeginExchange:
    """An action: begin an exchange with the parameters that this rank has trained so far."""

    exchange: int


@dataclass(frozen=True)
class UseResult:
    """An action: wait for the result of an exchange and use it."""

    exchange: int


@dataclass
class ExchangeTimetable:
    """The progress of a rank's training, and its next action.

    Attributes:
        rhythm: the frequency of exchanges.
        steps: the number of completed inner steps.
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
        """Adopts the step count of the other ranks if they have made exchanges that this rank has not begun.

        Args:
            decided: the number of exchanges that have been made, with this rank or without it.
        """
        if decided > self.begun:
            self.steps = max(self.steps, self.rhythm.begins(decided - 1))

    def due(self) -> BeginExchange | UseResult | None:
        """Returns the action that is due, or None if the next inner step comes first."""
        if self.used < self.begun and self.rhythm.is_used(self.used) <= self.steps:
            return UseResult(self.used)
        return BeginExchange(self.begun) if self.rhythm.begins(self.begun) <= self.steps else None

    def complete(self, action: BeginExchange | UseResult) -> None:
        """Records that an action was completed."""
        if isinstance(action, BeginExchange):
            self.begun = action.exchange + 1
        else:
            self.used = action.exchange + 1


@dataclass(frozen=True)
class Participants:
    """The ranks that participate in an exchange.

    Attributes:
        takes_part: whether each rank participates.
        is_final: whether all ranks have finished, so that there are no further exchanges.
    """

    takes_part: tuple[bool, ...]
    is_final: bool = False


class ArrivalTracker:
    """Selects the participants of successive exchanges.

    Args:
        ranks: the number of ranks.
        grace_s: the time in seconds that an exchange waits after the first rank has arrived.
        number: the first exchange.
    """

    def __init__(self, ranks: int, grace_s: float, number: int = 0) -> None:
        self._grace_s = grace_s
        self.number = number
        self._offered = [number - 1] * ranks  # the latest exchange at which each rank has arrived
        self._has_finished = [False] * ranks
        self._first_s: dict[int, float] = {}  # the time of the first arrival at each exchange

    def arrived(self, rank: int, number: int, now_s: float) -> None:
        """Records that a rank has arrived at an exchange, possibly too late, or has FINISHED its training."""
        if number == FINISHED:
            self._has_finished[rank] = True
            return
        for exchange in range(max(self._offered[rank] + 1, self.number), number + 1):
            self._first_s.setdefault(exchange, now_s)
        self._offered[rank] = max(self._offered[rank], number)

    def due_s(self) -> float | None:
        """Returns the latest time at which the current exchange is made, or None before the first arrival."""
        first_s = self._first_s.get(self.number)
        return None if first_s is None else first_s + self._grace_s

    def decide(self, now_s: float) -> Participants | None:
        """Returns the participants of the current exchange and advances to the next one; None if it has to wait."""
        has_arrived = tuple(offered >= self.number for offered in self._offered)
        if not any(has_arrived):
            return Participants(has_arrived, is_final=True) if all(self._has_finished) else None
        is_complete = all(map(or_, has_arrived, self._has_finished))
        due_s = self.due_s()
        if not is_complete and due_s is not None and now_s < due_s:
            return None
        self._first_s.pop(self.number, None)
        self.number += 1
        return Participants(has_arrived)


def participants_after_waiting(numbers: Sequence[int]) -> Participants:
    """Returns the participants of an exchange that waits for all ranks.

    Args:
        numbers: the exchange at which each rank has arrived, or FINISHED.

    Raises:
        ValueError: ranks that have not finished have arrived at different exchanges.

    >>> participants_after_waiting([4, FINISHED, 4])
    Participants(takes_part=(True, False, True), is_final=False)
    """
    takes_part = tuple(number != FINISHED for number in numbers)
    if len({number for number in numbers if number != FINISHED}) > 1:
        raise ValueError(f"by rank, the exchanges are {', '.join(map(str, numbers))}")
    return Participants(takes_part, is_final=not any(takes_part))
