"""How launchers find a coordinator after they have lost the one that they followed.

There is no ballot. A launcher *follows* one coordinator at a time: it passes on to its workers what this one says, and
nothing that another does. One that has lost its coordinator looks for another, in the order of the machines' numbers;
when it has come to itself, it *stands* for a while, so that others may follow it. Whoever follows reports all that it
knows (`knowledge.py`). The candidate coordinates as soon as its followers are enough to go on without the rest, in
every view of which any of them knows. It gives up its candidacy if that takes too long, and its followers look on.

Why there are never two truths. A view is entered by all its members or does not count, and it is passed on to them only
after launchers with a quorum of each view before it know of it (`views.py`). A coordinator elsewhere, with a quorum of
its own, has at least one of these launchers among its followers. That launcher either told it of the view, and so
it needs a quorum of that view too; or it has followed the other before it heard of the view, which it does not pass on
any more, and which therefore nobody can complete. Workers that are known to be dead do not count: whoever knows of a
death also knows the views that the dead worker could have entered, as long as a launcher's end counts only for those
that were connected to it until then and have read all that it sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline.train.elastic.protocol import Installed, MachineReport, ReplicatedJobState, merge_job_states

GATHER_S = 0.4  # a candidate with enough followers waits so long for those that may be on their way
_STAND_S = 0.6  # a candidacy lasts so long, and at random up to twice that
_PAUSE_S = 0.1
ALONE_S = 2.0  # after which a launcher believes that all others have ended
_PATIENCE_S = 1.0  # how long to wait for machines before this one in the order that have not lost the coordinator yet


class ContactResult(Enum):
    """What came of trying to follow a machine's launcher."""

    FOLLOWED = auto()  # it coordinates, or stands; this launcher follows it now
    ELSEWHERE = auto()  # it follows another
    SEEKING = auto()  # it looks for a coordinator itself
    ENDED = auto()  # nobody listens there, though the machine answers
    SILENT = auto()  # no answer


class ConnectionLoss(Enum):
    """How the connection to a coordinator came to its end."""

    ENDED = auto()  # the other launcher has ended; all that it sent was read
    RESET = auto()  # the other side knows nothing of the connection any more, though it was heard of just now
    DROPPED = auto()  # the other launcher has said that it goes on without this one
    SILENT = auto()  # nothing was heard for too long, or since this process was stopped


_GONE = {
    ConnectionLoss.ENDED: (ContactResult.ENDED, ContactResult.SILENT),
    ConnectionLoss.RESET: (ContactResult.ENDED,),
    ConnectionLoss.DROPPED: (),
    ConnectionLoss.SILENT: (),
}


@dataclass(frozen=True)
class TryMachine:
    """Connect to that machine; if it is this one, stand for `stand_s` seconds first."""

    number: int
    stand_s: float = 0.0


@dataclass(frozen=True)
class Pause:
    """Wait."""

    for_s: float


@dataclass(frozen=True)
class GiveUp:
    """Nobody was found for too long."""


@dataclass(frozen=True)
class JobDeserted:
    """The job is over: nobody listens where its launchers did, or this machine has nothing more to do in it."""


SearchStep = TryMachine | Pause | GiveUp | JobDeserted


@dataclass
class CoordinatorSearch:
    """Decides where one launcher looks for a coordinator; `chance` returns numbers between 0 and 1.

    Attributes:
        me: its machine's number.
        timeout_s: how long it looks.
        is_seeking: whether it looks now.
        answers: the latest of each machine.
    """

    me: int
    timeout_s: float
    chance: Callable[[], float]
    is_seeking: bool = False
    answers: dict[int, ContactResult] = field(default_factory=dict)
    _leader: int | None = None  # whom it has lost, as long as that one may be reached again
    _loss: ConnectionLoss = ConnectionLoss.SILENT
    _since_s: float = 0.0
    _waits_until_s: float = 0.0
    _order: list[int | None] = field(default_factory=list)  # None stands for a pause
    _is_turning: bool = False  # the coordinator has named another one, which was not tried in vain yet
    _alone_s: float | None = None  # since when all others seem to have ended

    def lost(self, leader: int, loss: ConnectionLoss, now_s: float) -> None:
        """The connection to a coordinator, or a candidate, is lost; the time runs since the last coordinator was."""
        if not self.is_seeking:
            self.is_seeking, self._since_s = True, now_s
            self._leader, self._loss = leader, loss
            self._begin([], now_s)

    def handed_over(self, to: int, now_s: float) -> None:
        """The coordinator that was followed ends in good order, and machine `to` takes its place."""
        self.is_seeking, self._since_s, self._leader = True, now_s, None
        self._begin([to], now_s)
        self._is_turning = True

    def found(self) -> None:
        """A coordinator was found."""
        self.is_seeking = self._is_turning = False

    @property
    def has_lost(self) -> bool:
        """Whether there is nobody to follow, as far as this launcher knows."""
        return self.is_seeking and not self._is_turning

    def next(self, peers: Sequence[int], now_s: float, *, is_done: bool = False) -> SearchStep:
        """Returns what to do now.

        Args:
            peers: the numbers of the machines that may live.
            now_s: the time.
            is_done: this machine's workers have come to the end of the training, so the job is about to end.
        """
        if now_s >= self._since_s + self.timeout_s:
            return GiveUp()
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
        before = [self.answers[each] for each in self.answers if each < self.me]
        if now_s < self._waits_until_s and (ContactResult.ELSEWHERE in before or ContactResult.SEEKING in before):
            self._order = []
            return Pause(_PAUSE_S)
        self._waits_until_s = now_s + _PATIENCE_S
        return TryMachine(self.me, _STAND_S * (1 + self.chance()))

    def tried(self, number: int, answer: ContactResult, elsewhere: int | None = None) -> bool:
        """Takes what came of a try, and whom the other one follows.

        Returns:
            Whether this shows that the launcher of that machine has ended, after this one had read all that it sent:
            its connection was closed in good order, and it cannot be reached; or it was reset, and nobody listens.
        """
        self.answers[number] = answer
        is_new = elsewhere is not None and elsewhere not in (self.me, self._leader, number)
        if answer is ContactResult.ELSEWHERE and is_new and not self._is_away(elsewhere):
            self._order.insert(0, elsewhere)
        if number != self._leader or answer not in _GONE[self._loss]:
            return False
        self._leader = None
        return True

    def _begin(self, order: list[int | None], now_s: float) -> None:
        self.answers, self._order, self._alone_s = {}, order, None
        self._is_turning = False
        self._waits_until_s = now_s + _PATIENCE_S

    def _is_alone(self, peers: Sequence[int], now_s: float, is_done: bool) -> bool:
        """Returns whether nobody is left to be found.

        A machine that answers, and where nobody listens at the launcher's port any more, says that this launcher has
        ended. That all have, for a while, happens when a job is over, or when all of them were killed: both ways
        nobody will come back. A path that is cut gives no answer, and is no sign of anything.
        """
        others = [number for number in peers if number != self.me]
        have_ended = bool(others) and all(self.answers.get(number) is ContactResult.ENDED for number in others)
        if not (have_ended or is_done):
            self._alone_s = None
        elif self._alone_s is None:
            self._alone_s = now_s
        return self._alone_s is not None and now_s >= self._alone_s + ALONE_S

    def _is_away(self, number: int | None) -> bool:
        return number is not None and self.answers.get(number) in (ContactResult.ENDED, ContactResult.SILENT)


@dataclass
class Candidacy:
    """A launcher that stands: the reports of its followers, and whether they are enough.

    Attributes:
        since_s: when it began.
        reports: by machine.
    """

    since_s: float
    until_s: float
    reports: dict[int, MachineReport] = field(default_factory=dict)
    _enough_s: float | None = None

    def follows(self, report: MachineReport, now_s: float) -> None:
        """Takes a follower's report."""
        self.reports[report.number] = report
        self._count(now_s)

    def left(self, number: int, now_s: float) -> None:
        """A follower is gone."""
        self.reports.pop(number, None)
        self._count(now_s)

    @property
    def deadline_s(self) -> float:
        """When to ask again."""
        return self.until_s if self._enough_s is None else self._enough_s + GATHER_S

    @property
    def has_enough(self) -> bool:
        """Whether the followers are enough to go on without the rest."""
        return self._enough_s is not None

    def is_elected(self, now_s: float) -> bool:
        """Returns whether it coordinates from now on."""
        if self._enough_s is None:
            return False
        known = merge_reports(self.reports.values())
        awaited = [each.number for each in known.peers if each.number not in known.ended]
        return now_s >= self._enough_s + GATHER_S or all(number in self.reports for number in awaited)

    def _count(self, now_s: float) -> None:
        known = merge_reports(self.reports.values())
        here = [worker.uid for report in self.reports.values() for worker in report.workers]
        if not known.views or not known.allows(here):
            self._enough_s = None
        elif self._enough_s is None:
            self._enough_s = now_s


def merge_reports(reports: Iterable[MachineReport]) -> ReplicatedJobState:
    """Returns what several machines know together.

    A worker says that it has entered a view after all its members have come to it, so one of them is enough to know
    that none of those before it counts.
    """
    known = list(reports)
    dead = ReplicatedJobState(dead=tuple(uid for each in known for uid, _, _ in each.ended))
    merged = merge_job_states([dead, *(each.knowledge for each in known)])
    entered = {
        message.generation
        for report in known
        for worker in report.workers
        for message in worker.said
        if isinstance(message, Installed)
    }
    complete = max([merged.complete, *(view.generation for view in merged.views if view.generation in entered)])
    return merge_job_states([ReplicatedJobState(complete=complete), merged])
