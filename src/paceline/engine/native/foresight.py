"""Compares how long calls take with what was predicted for them, and says so once if it was far off."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from paceline.schedule.cost import Choice, spell_seconds

_CALLS = 20
"""After so many calls of a kind the least time of them is compared: in some of them a rank was late."""

_FAR = 1.2


@dataclass
class _Seen:
    calls: int = 0
    least_s: float = float("inf")


class Foresight:
    """Has seen the calls of one group."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Seen] = {}
        self._has_spoken = False

    def compare(self, choice: Choice, took_s: float) -> str | None:
        """Notes a call; returns what is to be said about it, if anything.

        Args:
            choice: the algorithm of the call, and what it was predicted to take.
            took_s: how long the call took on this rank.
        """
        if self._has_spoken:
            return None
        seen = self._seen.setdefault((choice.operation, choice.nbytes), _Seen())
        seen.calls += 1
        seen.least_s = min(seen.least_s, took_s)
        predicted_s = next(each.seconds for each in choice.candidates if each.algorithm == choice.algorithm)
        if seen.calls != _CALLS or predicted_s / _FAR <= seen.least_s <= predicted_s * _FAR:
            return None
        self._has_spoken = True
        least, predicted = spell_seconds(seen.least_s), spell_seconds(predicted_s)
        return (
            f"{choice.operation} of {choice.nbytes:,} bytes by {choice.algorithm} took {least} at least in "
            f"{seen.calls} calls, but was predicted to take {predicted}: another algorithm may be faster. "
            "PACELINE_COSTS and PACELINE_NETWORK say what messages cost, and PACELINE_ALGORITHM forces one"
        )
