"""How far the clocks of two machines are apart, from questions and answers between them.

A machine asks another what time it is, and the answer comes back. Wherever in between the other one has read its clock,
it did so after the question was sent and before the answer came; so the middle of the two is off by at most half the
round trip. That holds for any delays, however unequal they are. The clocks of two machines run at slightly different
speeds, so what was measured grows old: each is allowed `DRIFT` of error for the time since.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

DRIFT = 1e-4  # two clocks that are kept by NTP differ by less, and undisciplined quartz hardly by more
_SAMPLES = 128


@dataclass(frozen=True)
class Offset:
    """What is added to this machine's CLOCK_MONOTONIC to get the other's: to within `error_ns`, at `at_ns` here."""

    offset_ns: int
    error_ns: int
    at_ns: int

    def at(self, now_ns: int) -> Offset:
        """Returns what is known of the offset at another time."""
        return Offset(self.offset_ns, self.error_ns + round(DRIFT * abs(now_ns - self.at_ns)), now_ns)


class OffsetEstimate:
    """The latest answers of one machine, of which the best one counts."""

    def __init__(self) -> None:
        self._samples: deque[Offset] = deque(maxlen=_SAMPLES)

    def add(self, asked_ns: int, told_ns: int, heard_ns: int) -> None:
        """Takes an answer: when it was asked for and when it came, by this machine's clock, and what it says."""
        if heard_ns >= asked_ns:
            middle_ns, half_ns = (asked_ns + heard_ns) // 2, (heard_ns - asked_ns) // 2
            error_ns = half_ns + round(DRIFT * half_ns) + 2  # the other's clock has drifted within the half, too
            self._samples.append(Offset(told_ns - middle_ns, error_ns, middle_ns))

    def at(self, now_ns: int) -> Offset | None:
        """Returns the offset with the smallest error at `now_ns`; None without an answer."""
        return min((each.at(now_ns) for each in self._samples), key=lambda each: each.error_ns, default=None)
