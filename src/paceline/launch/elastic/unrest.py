"""Does to the workers what `--chaos` asks for, and shows it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from paceline.launch.elastic.chaos import Act, Chaos, acts_of
from paceline.launch.elastic.crew import Member
from paceline.launch.elastic.cutting import cut
from paceline.launch.elastic.ledger import Ledger

_CONTINUES_AFTER_S = 5.0  # the last worker that holds the state is not killed when it is stopped
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Unrest:
    """Chaos among the workers of one machine; it begins when the first of them takes part.

    Args:
        chaos: what is to be done, and how often.
        machine: this machine's number; each has times of its own.
        spared: how many of the workers that take part here are left alone, since without any the state would be lost.
        say: shows the user a line.
    """

    def __init__(self, chaos: Chaos, machine: int, spared: int, say: Callable[[str], None]) -> None:
        self._chaos = chaos
        self._spared = spared
        self._acts = acts_of(chaos, machine)
        self._next: Act = next(self._acts)
        self._say = say
        self._ledger: Ledger | None = None
        self._hit: set[str] = set()
        self._stopped: list[tuple[float, Member]] = []  # and when each is continued

    @property
    def deadline_s(self) -> float | None:
        """When (monotonic) the next act is due; None before the chaos has begun."""
        if self._ledger is None:
            return None
        return min([self._ledger.began_s + self._next.at_s, *(at_s for at_s, _ in self._stopped)])

    def tick(self, now_s: float, members: Sequence[Member]) -> None:
        """Does what is due, to workers that take part."""
        while self._stopped and now_s >= self._stopped[0][0]:
            self._stopped.pop(0)[1].signal(signal.SIGCONT)
        while self._ledger is not None and now_s >= self._ledger.began_s + self._next.at_s:
            act, self._next = self._next, next(self._acts)
            candidates = [each for each in members if _takes_part(each) and each.uid not in self._hit]
            if len(candidates) <= self._spared:
                continue
            victim = act.victim_of(candidates)
            if self._do(act, victim):
                self._ledger.acted(act.kind)
                if act.kind == "stop":
                    self._stopped.append((now_s + _CONTINUES_AFTER_S, victim))

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

    def _do(self, act: Act, member: Member) -> bool:
        """Does something to a worker; returns whether it could be done."""
        assert member.worker is not None
        when = f"chaos at {act.at_s:.2f} s: {act.kind}"
        try:
            if act.kind == "cut":
                count = cut(member.worker.pid, member.worker.pidfd)
                self._say(f"{when} {count} connections of {member} to other machines")
                return count > 0
            os.kill(member.worker.pid, _SIGNALS[act.kind])
        except OSError as error:
            self._say(f"{when} is not possible for {member}: {error}")
            return False
        self._hit.add(member.uid)
        self._say(f"{when} {member}")
        return True


def _takes_part(member: Member) -> bool:
    life = member.life
    return member.runs and life.took_part_s is not None and not life.is_leaving and not life.has_finished
