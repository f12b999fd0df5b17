"""Decides what happens with the launchers of `paceline run --hosts`, without a process or a clock.

A launcher is called, answers, and is given its part. The first machine's says where all of them meet, and only then
have the others something to be given. Before that, one that does not come ends the job; after that, the machines end it
themselves, as in every job on several machines, and those that fail to are helped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from msgspec import structs

from paceline.launch.ssh.messages import Bye, Hello, Meeting, Part, Said
from paceline.launch.ssh.refusals import Attempt, no_answer, other_version, why_not

PATIENCE_S = 5.0  # how long launchers have to end by themselves after one was lost
OTHER_REASONS_S = 2.0  # how long machines have to say why they do not come, after one has
MARGIN_S = 15.0  # beyond the time that workers have to end
WRONG_FLAGS = 2  # the exit code of a launcher that has started nothing


class Phase(Enum):
    """How far a launcher has come."""

    CALLED = auto()
    ANSWERED = auto()
    GIVEN = auto()
    OVER = auto()


@dataclass(frozen=True)
class Give:
    """Give the launcher its part."""

    machine: int
    part: Part


@dataclass(frozen=True)
class PassOn:
    """Pass a signal on to the launcher."""

    machine: int
    name: str


@dataclass(frozen=True)
class Cut:
    """Cut the connection to the launcher, which ends it."""

    machine: int


@dataclass(frozen=True)
class Say:
    """Say a sentence to the user."""

    text: str


Action = Give | PassOn | Cut | Say


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds."""

    start_s: float
    shutdown_s: float


class Conduct:
    """The state of all launchers.

    Args:
        parts: what each is to run; the first has no meeting, and the others get its.
        attempts: how each is started.
        limits: how long things may take.
        now_s: the time.
        is_elastic: whether the job goes on without machines that are lost.
    """

    def __init__(
        self, parts: Sequence[Part], attempts: Sequence[Attempt], limits: Limits, now_s: float, is_elastic: bool = False
    ) -> None:
        self._parts = list(parts)
        self._attempts = list(attempts)
        self._limits = limits
        self._is_elastic = is_elastic
        self._phases = [Phase.CALLED] * len(parts)
        self._codes: list[int | None] = [None] * len(parts)
        self._meeting: tuple[str, int] | None = None
        self._actions: list[Action] = []
        self._is_failing = False  # a launcher did not start
        self._is_ending = False  # all have been asked to end
        self._code = 0
        self._start_by_s: float | None = now_s + limits.start_s
        self._end_by_s: float | None = None  # then launchers are asked to end
        self._cut_by_s: float | None = None  # then they are cut off

    @property
    def is_over(self) -> bool:
        """Whether every launcher has ended."""
        return all(phase is Phase.OVER for phase in self._phases)

    @property
    def exit_code(self) -> int:
        """The first code that was not 0; of an elastic job, that of the last launcher."""
        return self._code

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called at the latest."""
        return min(
            (each for each in (self._start_by_s, self._end_by_s, self._cut_by_s) if each is not None), default=None
        )

    def take_actions(self) -> list[Action]:
        """Returns what is to be done, in order."""
        actions, self._actions = self._actions, []
        return actions

    def said(self, machine: int, message: Said, now_s: float) -> None:
        """Takes in what a launcher says."""
        match message:
            case Hello() if self._phases[machine] is Phase.CALLED:
                self._on_hello(machine, message, now_s)
            case Meeting(host, port) if machine == 0 and self._meeting is None:
                self._meeting = host, port
                for other in range(1, len(self._parts)):
                    self._give(other)
            case Bye(code):
                self._codes[machine] = code

    def ended(self, machine: int, code: int, errors: str, now_s: float) -> None:
        """Takes in that a launcher, or the ssh that leads to it, has ended with this exit code."""
        phase, self._phases[machine] = self._phases[machine], Phase.OVER
        own = self._codes[machine]
        if phase is not Phase.GIVEN:
            self._fail([why_not(self._attempts[machine], code, errors)], now_s)
        elif own is None:
            self._on_loss(machine, now_s)
        elif machine == 0 and self._meeting is None and len(self._parts) > 1:
            self._code = self._code or own
            self._hurry(now_s)  # the others have nothing to wait for
        elif self._is_elastic and not self._is_ending:
            self._code = own
        elif own != 0:
            self._code = self._code or own
            self._hurry(now_s + (1.0 if own == WRONG_FLAGS else self._limits.shutdown_s + PATIENCE_S))
        if self.is_over:
            self._start_by_s = self._end_by_s = self._cut_by_s = None

    def signalled(self, name: str, now_s: float) -> None:
        """Takes in that the user or the scheduler sent a signal that ends the job."""
        self._is_ending = True
        self._code = self._code or 1
        for machine, phase in enumerate(self._phases):
            if phase is Phase.GIVEN:
                self._actions.append(PassOn(machine, name))
            elif phase is not Phase.OVER:
                self._actions.append(Cut(machine))
        self._start_by_s = self._end_by_s = None
        if self._cut_by_s is None:
            self._cut_by_s = now_s + self._limits.shutdown_s + MARGIN_S

    def tick(self, now_s: float) -> None:
        """Does what is due."""
        if self._start_by_s is not None and now_s >= self._start_by_s:
            late = [machine for machine, phase in enumerate(self._phases) if phase is Phase.CALLED] or [0]
            self._fail([no_answer(self._attempts[machine], self._limits.start_s) for machine in late], now_s)
        if self._end_by_s is not None and now_s >= self._end_by_s:
            self.signalled("SIGTERM", now_s)
        if self._cut_by_s is not None and now_s >= self._cut_by_s:
            self._cut_by_s = None
            self._cut_all()

    def _on_hello(self, machine: int, hello: Hello, now_s: float) -> None:
        attempt = replace(self._attempts[machine], python=hello.python)
        if hello.version != attempt.version:
            self._phases[machine] = Phase.ANSWERED
            self._fail([other_version(attempt, hello.version)], now_s)
            return
        self._phases[machine] = Phase.ANSWERED
        self._give(machine)

    def _give(self, machine: int) -> None:
        """Gives a launcher its part, if it has answered and knows where to meet."""
        if self._phases[machine] is not Phase.ANSWERED or self._is_failing or self._is_ending:
            return
        if machine == 0 or self._meeting is not None:
            self._phases[machine] = Phase.GIVEN
            part = self._parts[machine]
            self._actions.append(Give(machine, part if machine == 0 else structs.replace(part, meeting=self._meeting)))
        has_all = all(phase in (Phase.GIVEN, Phase.OVER) for phase in self._phases)
        if has_all and (self._meeting is not None or len(self._parts) == 1):
            self._start_by_s = None

    def _on_loss(self, machine: int, now_s: float) -> None:
        destination = self._attempts[machine].destination
        if not self._is_ending:
            way = "" if self._attempts[machine].is_here else ", or the ssh connection to it broke"
            self._actions.append(Say(f"{destination}: its launcher was killed{way}; its workers are ended there"))
        self._code = self._code or 1
        if not self._is_elastic or (machine == 0 and self._meeting is None):
            self._hurry(now_s + PATIENCE_S)

    def _fail(self, reasons: Sequence[str], now_s: float) -> None:
        """Ends the job, since launchers did not start; others may first say why they will not either."""
        if self._is_ending:
            return  # it is this that has ended them
        self._actions += [Say(reason) for reason in reasons]
        self._code, self._is_failing, self._start_by_s = self._code or 1, True, None
        if Phase.CALLED in self._phases:
            self._hurry(now_s + OTHER_REASONS_S)
        else:
            self.signalled("SIGTERM", now_s)

    def _hurry(self, end_by_s: float) -> None:
        """Gives the other launchers time to end by themselves."""
        if not self._is_ending:
            self._end_by_s = end_by_s if self._end_by_s is None else min(self._end_by_s, end_by_s)

    def _cut_all(self) -> None:
        self._actions += [Cut(machine) for machine, phase in enumerate(self._phases) if phase is not Phase.OVER]
