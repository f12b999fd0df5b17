"""Timing and participants of exchanges: two state machines that perform no I/O and do not read the clock.

`ExchangeScheduler` determines when an exchange starts and when its result is used. Exchanges are numbered from 0;
exchange k transfers fragment k mod `fragments` in round k // `fragments`. A round lasts `every` inner steps, and its
exchanges are spread evenly over these steps. A late rank adopts the step count of the other ranks. Otherwise, the rank
would fall further behind in each round.

`ArrivalTracker` selects the participants if exchanges do not wait for late ranks; one rank runs it for all ranks. An
exchange runs when all ranks have arrived, or when the grace window after the first arrival has passed. The ranks that
have arrived by then participate. Exchanges do not wait for ranks that have finished training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import or_

FINISHED = -1


@dataclass(frozen=True)
class ExchangeInterval:
    """The frequency and delay of exchanges."""

    every: int  # the number of inner steps in a round, which exchanges each fragment once
    fragments: int = 1  # the number of fragments, at most `every`
    delay: int = 0  # the number of inner steps from the start of an exchange to the use of its result; below `every`

    def fragment(self, exchange: int) -> int:
        """Returns the index of the fragment that an exchange transfers."""
        return exchange % self.fragments

    def begins(self, exchange: int) -> int:
        """Returns the number of inner steps after which an exchange starts.

        >>> [ExchangeInterval(every=10, fragments=4).begins(exchange) for exchange in range(6)]
        [3, 5, 8, 10, 13, 15]
        """
        earlier, fragment = divmod(exchange, self.fragments)
        return earlier * self.every - (-(fragment + 1) * self.every // self.fragments)

    def is_used(self, exchange: int) -> int:
        """Returns the number of inner steps after which the result of an exchange is used."""
        return self.begins(exchange) + self.delay

    def begun_after(self, steps: int) -> int:
        """Returns the number of exchanges that have started after `steps` inner steps.

        >>> [ExchangeInterval(every=10, fragments=4).begun_after(steps) for steps in (0, 2, 3, 9, 10, 23)]
        [0, 0, 1, 3, 4, 9]
        """
        begun = steps // self.every * self.fragments
        while self.begins(begun) <= steps:
            begun += 1
        return begun


@dataclass(frozen=True)
class BeginExchange:
    """The action that starts an exchange with this rank's current parameters."""

    exchange: int


@dataclass(frozen=True)
class UseResult:
    """The action that waits for the result of an exchange and applies it."""

    exchange: int


@dataclass
class ExchangeScheduler:
    """Tracks a rank's training progress and determines its next action."""

    rhythm: ExchangeInterval
    steps: int = 0  # the number of completed inner steps
    begun: int = 0  # the number of exchanges that have started
    used: int = 0  # the number of exchanges whose results have been used; never more than `begun`

    def step(self) -> None:
        """Counts an inner step."""
        self.steps += 1

    def catch_up(self, decided: int) -> None:
        """Adopts the other ranks' step count if this rank has not started all exchanges with known participants."""
        if decided > self.begun:
            self.steps = max(self.steps, self.rhythm.begins(decided - 1))

    def due(self) -> BeginExchange | UseResult | None:
        """Returns the action that is due, or None if another inner step must run first."""
        if self.used < self.begun and self.rhythm.is_used(self.used) <= self.steps:
            return UseResult(self.used)
        return BeginExchange(self.begun) if self.rhythm.begins(self.begun) <= self.steps else None

    def complete(self, action: BeginExchange | UseResult) -> None:
        """Records the completion of an action."""
        if isinstance(action, BeginExchange):
            self.begun = action.exchange + 1
        else:
            self.used = action.exchange + 1


@dataclass(frozen=True)
class Participants:
    """The ranks that participate in an exchange."""

    takes_part: tuple[bool, ...]  # one flag per rank
    is_final: bool = False  # whether all ranks have finished and there are no further exchanges


class ArrivalTracker:
    """Selects the participants of successive exchanges, starting with exchange `number`.

    An exchange waits for `grace_s` seconds after the first rank has arrived.
    """

    def __init__(self, ranks: int, grace_s: float, number: int = 0) -> None:
        self._grace_s = grace_s
        self.number = number
        self._offered = [number - 1] * ranks  # the latest exchange at which each rank has arrived
        self._has_finished = [False] * ranks
        self._first_s: dict[int, float] = {}  # the time of the first arrival at each exchange

    def arrived(self, rank: int, number: int, now_s: float) -> None:
        """Records that a rank has arrived at exchange `number`, or that it has finished if `number` is FINISHED."""
        if number == FINISHED:
            self._has_finished[rank] = True
            return
        for exchange in range(max(self._offered[rank] + 1, self.number), number + 1):
            self._first_s.setdefault(exchange, now_s)
        self._offered[rank] = max(self._offered[rank], number)

    def due_s(self) -> float | None:
        """Returns the deadline for the current exchange in seconds, or None before the first arrival."""
        first_s = self._first_s.get(self.number)
        return None if first_s is None else first_s + self._grace_s

    def decide(self, now_s: float) -> Participants | None:
        """Returns the participants and advances to the next exchange; returns None if the exchange must still wait."""
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
    """Returns the participants of an exchange that waits for all ranks, given each rank's arrival or FINISHED.

    Raises ValueError if unfinished ranks have arrived at different exchanges.

    >>> participants_after_waiting([4, FINISHED, 4])
    Participants(takes_part=(True, False, True), is_final=False)
    """
    takes_part = tuple(number != FINISHED for number in numbers)
    if len({number for number in numbers if number != FINISHED}) > 1:
        raise ValueError(f"by rank, the exchanges are {', '.join(map(str, numbers))}")
    return Participants(takes_part, is_final=not any(takes_part))
