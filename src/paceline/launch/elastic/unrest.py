"""Does to the workers what `--chaos` asks for, and shows it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence

from paceline.launch.elastic.chaos import Act, Chaos, acts_of
from paceline.launch.elastic.crew import Member
from paceline.launch.elastic.ledger import Ledger

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Unrest:
    """Chaos among the workers of one machine; it begins when the first of them takes part.

    It spares the last worker that takes part here, since without any the job's state would be lost.

    Args:
        chaos: what is to be done, and how often.
        machine: this machine's number; each has times of its own.
        say: shows the user a line.
    """

    def __init__(self, chaos: Chaos, machine: int, say: Callable[[str], None]) -> None:
        self._chaos = chaos
        self._acts = acts_of(chaos, machine)
        self._next: Act = next(self._acts)
        self._say = say
        self._ledger: Ledger | None = None
        self._hit: set[str] = set()

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) the next act is due; None before the chaos has begun."""
        return None if self._ledger is None else self._ledger.began_s + self._next.at_s

    def tick(self, now_s: float, members: Sequence[Member]) -> None:
        """Does what is due, to workers that take part."""
        while self._ledger is not None and now_s >= self._ledger.began_s + self._next.at_s:
            act, self._next = self._next, next(self._acts)
            candidates = [each for each in members if _takes_part(each) and each.uid not in self._hit]
            if len(candidates) > 1:
                self._do(act, act.victim_of(candidates))
                self._ledger.acted(act.kind)

    def entered(self, member: Member, is_new: bool, now_s: float) -> None:
        """Notes that a worker has entered a view."""
        if self._ledger is None:
            self._ledger = Ledger(now_s)
        self._ledger.entered(member.number, member.uid, is_new, now_s)

    def lost(self, member: Member, members: Sequence[Member], now_s: float) -> None:
        """Notes that a worker has ended which another is to replace."""
        if self._ledger is not None:
            others = {each.uid for each in members if _takes_part(each) and each is not member}
            self._ledger.lost(member.number, others, now_s)

    def summary(self, now_s: float) -> list[str]:
        """Returns what was done and what it cost, for the user."""
        if self._ledger is None:
            return [f"chaos ({self._chaos}): nothing was done, since no worker took part"]
        return self._ledger.summary(str(self._chaos), now_s)

    def _do(self, act: Act, member: Member) -> None:
        assert member.worker is not None
        self._hit.add(member.uid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.worker.pid, _SIGNALS[act.kind])
        self._say(f"chaos at {act.at_s:.2f} s: {act.kind} {member}")


def _takes_part(member: Member) -> bool:
    life = member.life
    return member.runs and life.took_part_s is not None and not life.is_leaving and not life.has_finished
