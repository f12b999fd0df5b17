"""The election of a new coordinator by launchers that have lost their coordinator.

Launchers do not vote. A launcher *follows* one coordinator at a time: it passes that coordinator's messages on to its
workers and ignores the messages of all other coordinators. A launcher that has lost its coordinator tries the machines
in the order of their numbers. When it reaches its own number, it *stands* as a candidate for some time, during which
other launchers can follow it. A follower sends all its data about the job (`MachineReport`). The candidate becomes the
coordinator as soon as its followers form a quorum in every view that any of them holds. If this takes too long, the
candidate gives up, and its followers continue their search.

Two coordinators never contradict each other, for the following reason. A view takes effect only if all its members
enter it. The view is passed on to the members only after launchers with a quorum of each earlier view hold it
(`views.py`). Any other coordinator with a quorum has at least one of these launchers among its followers. If that
launcher has reported the view, the other coordinator also needs a quorum of the view. If not, the launcher began to
follow the other coordinator before it received the view. In that case, the launcher does not pass the view on, so the
view cannot be completed. Dead workers do not count, because a launcher that has recorded a death also has the views
that the dead worker could have entered. For this reason, a launcher records another launcher's exit only if the two
were connected until the exit and it has read everything that the other launcher sent.

A coordinator that was cut off may be followed by a launcher that has followed a later coordinator in the meantime. The
coordinator that was cut off then resigns, because it does not require a quorum of the later coordinator's views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.train.elastic.protocol import MachineReport, ReplicatedJobState, ViewInstalled, merge_job_states

GATHER_S = 0.4  # time for which a candidate with enough followers waits for more
_STAND_S = 0.6  # minimum duration of a candidacy; the actual duration is random, and at most twice as long
_PAUSE_S = 0.1
ALONE_S = 2.0  # time after which a launcher assumes that all others have exited
_PATIENCE_S = 1.0  # time for lower-numbered machines to detect the loss of the coordinator


class ContactResult(Enum):
    """The result of an attempt to follow a machine's launcher."""

    FOLLOWED = auto()  # the other launcher is the coordinator or a candidate, and this launcher now follows it
    ELSEWHERE = auto()  # the other launcher follows another coordinator
    SEEKING = auto()  # the other launcher is also searching for a coordinator
    ENDED = auto()  # the machine responds, but its launcher's port is closed
    SILENT = auto()  # the machine does not respond


class ConnectionLoss(Enum):
    """The reason why the connection to a coordinator was lost."""

    ENDED = auto()  # the coordinator's launcher has exited, and all its messages were read
    RESET = auto()  # the coordinator's machine has reset the connection, which was active just before
    DROPPED = auto()  # the coordinator has announced that it continues without this launcher
    SILENT = auto()  # no message arrived for too long, or this process was stopped


_GONE = {
    ConnectionLoss.ENDED: (ContactResult.ENDED, ContactResult.SILENT),
    ConnectionLoss.RESET: (ContactResult.ENDED,),
    ConnectionLoss.DROPPED: (),
    ConnectionLoss.SILENT: (),
}


@dataclass(frozen=True)
class TryMachine:
    """Connect to machine `number`. If that is this machine, first stand as a candidate for `stand_s` seconds."""

    number: int
    stand_s: float = 0.0


@dataclass(frozen=True)
class Pause:
    """Wait for `for_s` seconds."""

    for_s: float


@dataclass(frozen=True)
class StopSearch:
    """Stop the search: no coordinator was found in time."""


@dataclass(frozen=True)
class JobDeserted:
    """The job has ended: all its launchers have exited, or this machine's part of the job is complete."""


SearchStep = TryMachine | Pause | StopSearch | JobDeserted


@dataclass
class CoordinatorSearch:
    """A launcher's search for a coordinator."""

    me: int  # the launcher's machine number
    timeout_s: float  # the time after which the launcher gives up the search
    chance: Callable[[], float]  # returns random numbers between 0 and 1
    is_seeking: bool = False
    answers: dict[int, ContactResult] = field(default_factory=dict)  # the result of the latest attempt, by machine
    _leader: int | None = None  # the lost coordinator, while it may become reachable again
    _loss: ConnectionLoss = ConnectionLoss.SILENT
    _since_s: float = 0.0
    _waits_until_s: float = 0.0
    _order: list[int | None] = field(default_factory=list)  # machines still to try, where None means a pause
    _is_turning: bool = False  # whether the coordinator announced a successor that may still be reachable
    _alone_s: float | None = None  # the time at which all others first seemed to have exited

    def lost(self, leader: int, loss: ConnectionLoss, now_s: float) -> None:
        """Records the loss of a coordinator or candidate. The timeout starts at the loss of the last coordinator."""
        if not self.is_seeking:
            self.is_seeking, self._since_s = True, now_s
            self._leader, self._loss = leader, loss
            self._begin([], now_s)

    def handed_over(self, to: int, now_s: float) -> None:
        """Records that the coordinator is shutting down in an orderly way and that machine `to` takes over."""
        self.is_seeking, self._since_s, self._leader = True, now_s, None
        self._begin([to], now_s)
        self._is_turning = True

    def found(self) -> None:
        """Records that a coordinator was found."""
        self.is_seeking = self._is_turning = False

    @property
    def has_lost(self) -> bool:
        """Whether this launcher has no coordinator to follow."""
        return self.is_seeking and not self._is_turning

    def next(self, peers: Sequence[int], now_s: float, *, is_done: bool = False) -> SearchStep:
        """Returns the next step, given the numbers of the machines that may be alive.

        If `is_done`, this machine's workers have completed training, and the job is about to end.
        """
        if now_s >= self._since_s + self.timeout_s:
            return StopSearch()
        if self._is_alone(peers, now_s, is_done):
            return JobDeserted()
        if not self._order:
            self._is_turning = False
            first = [] if self._leader in (None, self.me) else [self._leader]
            self._order = [*first, *sorted({*peers, self.me} - {*first}), None]
        number = self._order.pop(0)
        if number is None:
            return Pause(_PAUSE_S * (1 + self.chance()))
        if number != self.me:
            return TryMachine(number)
        before = [answer for number, answer in self.answers.items() if number < self.me]
        if now_s < self._waits_until_s and (ContactResult.ELSEWHERE in before or ContactResult.SEEKING in before):
            self._order = []
            return Pause(_PAUSE_S)
        self._waits_until_s = now_s + _PATIENCE_S
        return TryMachine(self.me, _STAND_S * (1 + self.chance()))

    def tried(self, number: int, answer: ContactResult, elsewhere: int | None = None) -> bool:
        """Records the result of an attempt to follow machine `number`, whose launcher may itself follow `elsewhere`.

        Returns:
            Whether the result proves that the lost coordinator on machine `number` has exited, and that this launcher
            has read all its messages. This holds if the coordinator closed the connection cleanly and does not respond,
            or if the connection was reset and the coordinator's port is closed.
        """
        self.answers[number] = answer
        is_away = elsewhere is None or self.answers.get(elsewhere) in (ContactResult.ENDED, ContactResult.SILENT)
        if answer is ContactResult.ELSEWHERE and not is_away and elsewhere not in (self.me, self._leader, number):
            self._order.insert(0, elsewhere)
        if number != self._leader or answer not in _GONE[self._loss]:
            return False
        self._leader = None
        return True

    def _begin(self, order: list[int | None], now_s: float) -> None:
        self.answers, self._order, self._alone_s, self._is_turning = {}, order, None, False
        self._waits_until_s = now_s + _PATIENCE_S

    def _is_alone(self, peers: Sequence[int], now_s: float, is_done: bool) -> bool:
        """Returns True if no other launcher is left.

        A machine that responds but has closed the launcher's port no longer has a launcher. If that holds for all other
        machines for some time, the job has ended or all launchers were killed, and none will return. A missing response
        proves nothing, because the network path may be broken. The result is also True some time after this machine's
        workers have completed training.
        """
        others = [number for number in peers if number != self.me]
        have_ended = bool(others) and all(self.answers.get(number) is ContactResult.ENDED for number in others)
        if not (have_ended or is_done):
            self._alone_s = None
        elif self._alone_s is None:
            self._alone_s = now_s
        return self._alone_s is not None and now_s >= self._alone_s + ALONE_S


@dataclass
class Candidacy:
    """A launcher's candidacy: the reports of its followers, and whether the followers form a quorum."""

    since_s: float  # the time at which the candidacy began
    until_s: float  # the time at which the candidacy ends if there are not enough followers
    reports: dict[int, MachineReport] = field(default_factory=dict)  # by machine
    _enough_s: float | None = None  # the time since which there have been enough followers

    def follows(self, report: MachineReport, now_s: float) -> None:
        """Adds a follower's report."""
        self.reports[report.number] = report
        self._count(now_s)

    def left(self, number: int, now_s: float) -> None:
        """Removes a follower."""
        self.reports.pop(number, None)
        self._count(now_s)

    @property
    def deadline_s(self) -> float:
        """The time at which the candidacy must be evaluated again."""
        return self.until_s if self._enough_s is None else self._enough_s + GATHER_S

    @property
    def has_enough(self) -> bool:
        """Whether there are enough followers to continue without the other machines."""
        return self._enough_s is not None

    def is_elected(self, now_s: float) -> bool:
        """Returns True if the candidate has become the coordinator."""
        if self._enough_s is None:
            return False
        known = merge_reports(self.reports.values())
        awaited = [peer.number for peer in known.peers if peer.number not in known.ended]
        return now_s >= self._enough_s + GATHER_S or all(number in self.reports for number in awaited)

    def _count(self, now_s: float) -> None:
        known = merge_reports(self.reports.values())
        reached = [worker.uid for report in self.reports.values() for worker in report.workers]
        if not known.views or not known.allows(reached):
            self._enough_s = None
        elif self._enough_s is None:
            self._enough_s = now_s


def merge_reports(reports: Iterable[MachineReport]) -> ReplicatedJobState:
    """Returns the job state that follows from the reports of several machines.

    A worker reports that it has entered a view only after all members have formed the view's group. A single such
    report therefore proves that all earlier views are obsolete.
    """
    known = list(reports)
    dead = ReplicatedJobState(dead=tuple(uid for report in known for uid, _, _ in report.ended))
    merged = merge_job_states([dead, *(report.job_state for report in known)])
    entered = {
        message.generation
        for report in known
        for worker in report.workers
        for message in worker.messages
        if isinstance(message, ViewInstalled)
    }
    complete = max([merged.complete, *(view.generation for view in merged.views if view.generation in entered)])
    return merge_job_states([ReplicatedJobState(complete=complete), merged])
