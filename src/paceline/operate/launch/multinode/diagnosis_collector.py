"""Controllers that wrap another controller: `DiagnosisCollector` and `DashboardRelay`.

`DiagnosisCollector` merges the nodes' snapshots into one diagnosis for the user. `DashboardRelay` forwards the live
page's data between nodes. Like the controllers that they wrap, both are state machines that use neither sockets nor a
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.operate.diagnosis.stall_detector import StallReporter, explain_or_default
from paceline.operate.launch.multinode.membership import JobController, Orders
from paceline.operate.launch.multinode.protocol import (
    DashboardUpdate,
    DashboardWatched,
    JobEnded,
    JoinJob,
    Report,
    RequestSnapshot,
    SnapshotReport,
    StacksRequest,
    Start,
    UserMessage,
)

if TYPE_CHECKING:
    from paceline.operate.diagnosis.finding import Diagnosis
    from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot


@dataclass
class ControllerMiddleware:
    """A controller that forwards everything to `inner`. Subclasses handle some reports themselves."""

    inner: JobController
    _serves: dict[str, bool] = field(default_factory=dict, kw_only=True)  # whether each node hosts the rendezvous

    @property
    def deadline_s(self) -> float | None:
        """The time at which `tick` must be called, or None."""
        return self.inner.deadline_s

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Handles a node's report."""
        if isinstance(report, JoinJob):
            self._serves[node] = report.serves
        return self.inner.reported(node, report, now_s)

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has exited."""
        self._forget(node)
        return self.inner.ended(node, why, now_s)

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node that was lost."""
        self._forget(node)
        return self.inner.lost(node, why, now_s, silent_s)

    def tick(self, now_s: float) -> Orders:
        """Carries out the work that is due at `now_s`."""
        return self.inner.tick(now_s)

    def _serving(self) -> list[str]:
        """Returns a list with the node that hosts the rendezvous; empty if that node is not connected."""
        return [node for node, serves in self._serves.items() if serves]

    def _others(self) -> list[str]:
        return [node for node, serves in self._serves.items() if not serves]

    def _forget(self, node: str) -> None:
        self._serves.pop(node, None)


@dataclass
class DashboardRelay(ControllerMiddleware):
    """A controller that also relays `DashboardWatched`, `StacksRequest` and `DashboardUpdate` between nodes."""

    _is_watched: bool = False

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Handles a node's report."""
        if isinstance(report, DashboardWatched):
            self._is_watched = report.is_on
        if isinstance(report, DashboardWatched | StacksRequest):
            return [(other, report) for other in self._others()]
        if isinstance(report, DashboardUpdate):
            return [(other, report) for other in self._serving()]
        orders = super().reported(node, report, now_s)
        if isinstance(report, JoinJob) and self._is_watched and not report.serves:
            orders = [*orders, (node, DashboardWatched(True))]
        return orders


# time to wait for the job's end before a failure's diagnosis is printed, because the diagnosis should be printed last
HOLD_S = 2.0
PATIENCE_S = 4.0  # time to wait for other nodes' snapshots of a stall
LAST_PATIENCE_S = 10.0  # time to wait if the cause may be on a missing node that is not lost
FAILURE_PATIENCE_S = 0.3  # time to wait for snapshots after a failure; nodes take these snapshots immediately
FAILURE_LAST_PATIENCE_S = 4.0


@dataclass(frozen=True)
class ReceivedSnapshot:
    """A snapshot and its time of arrival. Nodes have different clocks and may take their snapshots seconds apart."""

    picture: MachineSnapshot
    at_s: float
    is_short: bool = False

    def by(self, now_s: float) -> MachineSnapshot:
        """Returns the snapshot as if it had been taken now."""
        return replace(self.picture, taken_s=self.picture.taken_s + now_s - self.at_s)

    @property
    def stalled_since_s(self) -> float | None:
        """The start time of the longest overdue call, converted to the clock used by `at_s`, or None."""
        since_s = self.picture.stalled_since_s
        return None if since_s is None else self.at_s - (self.picture.taken_s - since_s)


@dataclass
class SnapshotCollection:
    """A collection of snapshots in progress."""

    missing: set[str]  # the nodes whose snapshots have not arrived yet
    deadline_s: float  # the time at which to diagnose the snapshots received so far
    last_s: float  # the extended deadline, used if the snapshots do not reveal the cause by `deadline_s`
    pictures: dict[str, ReceivedSnapshot] = field(default_factory=dict)

    def add(self, node: str, arrived: ReceivedSnapshot) -> None:
        """Adds a snapshot from a node, whether requested or not."""
        self.pictures[node] = arrived
        self.missing.discard(node)

    def is_over(self, now_s: float) -> bool:
        """Returns True if the collection is complete or its deadline has passed."""
        return not self.missing or now_s >= self.deadline_s

    def extend(self) -> bool:
        """Extends the deadline to `last_s`; returns whether there are any snapshots left to wait for."""
        is_later = bool(self.missing) and self.last_s > self.deadline_s
        self.deadline_s = self.last_s
        return is_later


@dataclass(frozen=True)
class HeldDiagnosis:
    """The diagnosis of a failure, to be printed at `due_s` unless the job ends earlier."""

    verdict: Diagnosis
    due_s: float


@dataclass
class DiagnosisCollector(ControllerMiddleware):
    """A controller that also handles snapshots; `inner` makes all other decisions."""

    word: str = "rank"  # the noun for a worker's number in messages
    _stall: SnapshotCollection | None = None
    _failure: SnapshotCollection | None = None  # at most two per generation: one for the consequence, one for the cause
    _last: dict[str, ReceivedSnapshot] = field(default_factory=dict)  # final snapshots of exited workers, by node
    _places: dict[str, ReceivedSnapshot] = field(default_factory=dict)  # latest snapshots of a failure, by node
    _reporter: StallReporter = field(default_factory=StallReporter)
    _has_failed: bool = False  # whether a worker in this generation has failed on its own
    _has_looked: bool = False  # whether a failure in this generation has been examined, whatever its cause
    _held: HeldDiagnosis | None = None  # the diagnosis of a failure, until it is printed
    _explained: Diagnosis | None = None  # the diagnosis of a failure that has been printed
    _has_ended: bool = False

    @property
    def deadline_s(self) -> float | None:
        """The time at which `tick` must be called, or None."""
        rounds = [collection.deadline_s for collection in (self._stall, self._failure) if collection is not None]
        own_s = min([*rounds, *([self._held.due_s] if self._held is not None else [])], default=None)
        known = [time_s for time_s in (self.inner.deadline_s, own_s) if time_s is not None]
        return min(known, default=None)

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Handles a node's report."""
        if isinstance(report, SnapshotReport):
            return self._sighted(node, report, now_s)
        return self._with_final_diagnosis(super().reported(node, report, now_s), now_s)

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has exited."""
        return self._with_final_diagnosis(super().ended(node, why, now_s), now_s)

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node that was lost."""
        return self._with_final_diagnosis(super().lost(node, why, now_s, silent_s), now_s)

    def tick(self, now_s: float) -> Orders:
        """Carries out the work that is due at `now_s`."""
        return [*self._with_final_diagnosis(super().tick(now_s), now_s), *self._conclude(now_s)]

    def _sighted(self, node: str, sighting: SnapshotReport, now_s: float) -> Orders:
        if not sighting.body:
            text = self._reporter.resumed(now_s)
            return self._send_to_serving(UserMessage(text)) if text is not None else []
        from paceline.operate.diagnosis.machine_snapshot import decode

        try:
            picture = decode(sighting.body)
        except ValueError:
            return []
        arrived = ReceivedSnapshot(picture, now_s, sighting.is_short)
        orders: Orders = []
        if sighting.is_last:
            self._last[node] = arrived
            if self._failure is not None:
                self._failure.add(node, arrived)
        elif sighting.is_failure:
            self._places[node] = arrived
            is_new = not (self._has_failed if _has_cause(picture) else self._has_looked)
            self._has_failed = self._has_failed or _has_cause(picture)
            if is_new and self._failure is None:
                self._has_looked = True
                look = RequestSnapshot(is_failure=True, is_deep=_is_of_calls(picture))
                self._failure, orders = self._round(
                    node, look, now_s + FAILURE_PATIENCE_S, now_s + FAILURE_LAST_PATIENCE_S
                )
                for other, last in self._last.items():
                    self._failure.add(other, last)
            if self._failure is not None:
                self._failure.add(node, arrived)
        else:
            if self._stall is None and picture.stalled_since_s is not None:
                self._stall, orders = self._round(node, RequestSnapshot(), now_s + PATIENCE_S, now_s + LAST_PATIENCE_S)
            if self._stall is not None:
                self._stall.add(node, arrived)
        return [*orders, *self._conclude(now_s)]

    def _round(
        self, node: str, order: RequestSnapshot, deadline_s: float, last_s: float
    ) -> tuple[SnapshotCollection, Orders]:
        others = set(self._serves) - {node}
        return SnapshotCollection(others, deadline_s, last_s), [(other, order) for other in sorted(others)]

    def _conclude(self, now_s: float) -> Orders:
        """Diagnoses complete collections and returns the resulting messages."""
        if self._held is not None and now_s >= self._held.due_s:
            self._explained, self._held = self._held.verdict, None
            return [*self._report_verdict(self._explained, now_s), *self._conclude(now_s)]
        if self._failure is not None and self._failure.is_over(now_s):
            return self._conclude_failure(self._failure, now_s)
        if self._stall is None or not self._stall.is_over(now_s):
            return []
        verdict = self._verdict(self._stall.pictures, now_s)
        if (verdict is None or not verdict.is_certain) and self._stall.extend():
            return []
        pictures, self._stall = self._stall.pictures.values(), None
        stalls = [since_s for snapshot in pictures if (since_s := snapshot.stalled_since_s) is not None]
        return [] if verdict is None or not stalls else self._report_verdict(verdict, min(stalls))

    def _conclude_failure(self, finished: SnapshotCollection, now_s: float) -> Orders:
        """Diagnoses a failure, or extends the wait if the cause may be on a missing node.

        If no rank has failed on its own, the diagnosis is kept only if a rank exited early or all nodes have reported.
        """
        verdict = self._verdict(finished.pictures, now_s)
        is_known = verdict is not None and (verdict.is_failure or verdict.is_early_exit) and verdict.is_certain
        if not is_known and finished.extend():
            return []
        self._failure = None
        is_whole = verdict is not None and verdict.is_fault and not finished.missing and self._has_failed
        if verdict is not None and (is_known or verdict.is_failure or is_whole):
            self._held = HeldDiagnosis(verdict, now_s + HOLD_S)
        return []

    def _report_verdict(self, verdict: Diagnosis, since_s: float) -> Orders:
        """Returns the message with a diagnosis, or no message if it would repeat the previous one."""
        text = self._reporter.report(verdict, since_s)
        if text is None:
            return []
        is_failure = verdict.is_failure
        return self._send_to_serving(
            UserMessage(text, is_stall=not is_failure, is_failure=is_failure, blamed=verdict.blamed)
        )

    def _verdict(self, pictures: Mapping[str, ReceivedSnapshot], now_s: float) -> Diagnosis | None:
        from paceline.operate.diagnosis.diagnosis import diagnose
        from paceline.operate.diagnosis.machine_snapshot import job_snapshot_of

        return explain_or_default(
            lambda: diagnose(job_snapshot_of((snapshot.by(now_s) for snapshot in pictures.values()), self.word)), None
        )

    def _send_to_serving(self, message: UserMessage) -> Orders:
        # another node may host the rendezvous by now
        return [(node, message) for node in self._serving() or self._serves]

    def _with_final_diagnosis(self, orders: Orders, now_s: float) -> Orders:
        """Inserts a final diagnosis before the orders that end a job: the cause of its failure, or the stragglers."""
        if any(isinstance(order, Start) for _, order in orders):
            self._stall = self._failure = None
            self._has_failed = self._has_looked = False
            self._held = self._explained = None
            self._last.clear()
            self._places.clear()
            self._reporter = StallReporter()
        ends = [(node, order) for node, order in orders if isinstance(order, JobEnded)]
        if self._has_ended or not ends:
            return orders
        self._has_ended = True
        held, self._held = self._held, None
        messages = [(node, message) for message in self._last_words(ends[0][1], held, now_s) for node, _ in ends]
        return [*messages, *orders]

    def _last_words(self, end: JobEnded, held: HeldDiagnosis | None, now_s: float) -> list[UserMessage]:
        """Returns the messages to print at the end of a job.

        A diagnosis is printed last. If none of the failures is the cause, the diagnosis is printed before the failures,
        so that the first line is not about a consequence; the last line then refers to the diagnosis.
        """
        from paceline.operate.diagnosis.finding import reminder

        if end.code == 0:
            from paceline.operate.diagnosis.stragglers import describe_slowdowns

            pictures = [snapshot.picture for snapshot in self._last.values() if not snapshot.is_short]
            sentences = explain_or_default(lambda: describe_slowdowns(pictures, self.word), [])
            return [UserMessage(sentence, is_last=True) for sentence in sentences]
        seen = self._failure.pictures if self._failure is not None else {}
        last = {node: _with_places(snapshot, self._places.get(node)) for node, snapshot in self._last.items()}
        verdict = self._verdict({**seen, **last}, now_s) if seen or (last and end.failures) else None
        if verdict is None:
            verdict = held.verdict if held is not None else self._explained
        # If no failure was reported, the job ended because a node was lost. A rank that failed earlier is still
        # reported.
        if verdict is None or not (verdict.is_failure or (verdict.is_fault and end.failures)):
            return []
        before = self._explained
        if before is not None and (before.cause, before.blamed) == (verdict.cause, verdict.blamed):
            return [UserMessage(reminder(verdict, self.word), is_last=True)]
        is_headline = bool(end.failures) and all(
            failure.is_consequence or failure.is_mismatch for failure in end.failures
        )
        messages = [UserMessage(verdict.sentence, is_last=True, is_headline=is_headline)]
        if is_headline:
            messages.append(UserMessage(reminder(verdict, self.word), is_last=True))
        return messages

    def _forget(self, node: str) -> None:
        super()._forget(node)
        for collection in (self._stall, self._failure):
            if collection is not None:
                collection.missing.discard(node)


def _with_places(last: ReceivedSnapshot, seen: ReceivedSnapshot | None) -> ReceivedSnapshot:
    """Adds the locations seen after a failure to the final snapshot, for ranks that the launcher stopped later."""
    places = {rank.rank: rank.place for rank in seen.picture.ranks if rank.ending is None} if seen is not None else {}
    ranks = tuple(
        replace(rank, place=places.get(rank.rank)) if rank.ending is None and rank.place is None else rank
        for rank in last.picture.ranks
    )
    return replace(last, picture=replace(last.picture, ranks=ranks))


def _has_cause(picture: MachineSnapshot) -> bool:
    """Returns True if a rank failed for a reason other than another rank's failure."""
    from paceline.operate.diagnosis.job_snapshot import ExitReason

    harmless = (ExitReason.FINISHED, ExitReason.CONSEQUENCE)
    return any(rank.ending is not None and rank.ending.manner not in harmless for rank in picture.ranks)


def _is_of_calls(picture: MachineSnapshot) -> bool:
    """Returns True if a rank failed because its calls did not match those of the other ranks."""
    from paceline.operate.diagnosis.job_snapshot import ExitReason

    return any(rank.manner is ExitReason.MISMATCH for rank in picture.ranks)
