"""Who takes part in an exchange, when late ranks are not waited for: a state machine without communication or a clock.

One rank calls the roll for all. An exchange is held when all ranks have come to it, or when the grace window has
passed since the first of them came; then those that are there take part. A rank that has finished its training is not
waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FINISHED = -1


@dataclass(frozen=True)
class Verdict:
    """Who takes part in an exchange.

    Attributes:
        takes_part: for each rank, whether it does.
        is_final: no rank has any exchange to come, since all have finished.
    """

    takes_part: tuple[bool, ...]
    is_final: bool = False


class Roll:
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

    def call(self, now_s: float) -> Verdict | None:
        """Returns who takes part in the current exchange, and goes on to the next one; None if it has to wait."""
        there = tuple(offered >= self.number for offered in self._offered)
        if not any(there):
            return Verdict(there, is_final=True) if all(self._has_finished) else None
        awaits = any(not come and not over for come, over in zip(there, self._has_finished, strict=True))
        due_s = self.due_s()
        if awaits and due_s is not None and now_s < due_s:
            return None
        self._first_s.pop(self.number, None)
        self.number += 1
        return Verdict(there)


def who_is_there(numbers: Sequence[int]) -> Verdict:
    """Returns who takes part if all ranks are waited for, from the exchange that each has come to, or FINISHED.

    Raises:
        ValueError: ranks that have not finished have come to different exchanges.

    >>> who_is_there([4, FINISHED, 4])
    Verdict(takes_part=(True, False, True), is_final=False)
    """
    there = tuple(number != FINISHED for number in numbers)
    if len({number for number in numbers if number != FINISHED}) > 1:
        raise ValueError(f"by rank, the exchanges are {', '.join(map(str, numbers))}")
    return Verdict(there, is_final=not any(there))
