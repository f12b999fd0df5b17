"""`StandbyController`: responds to launchers that search for the coordinator of an elastic job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.operate.launch.elastic.elastic_controller import ElasticController
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.multinode.membership import MembershipPolicy, Orders
from paceline.operate.launch.multinode.protocol import (
    Follow,
    FollowResponse,
    JobRunning,
    JoinJob,
    NodeDropped,
    Order,
    Report,
)
from paceline.train.elastic.coordinator.election import Candidacy


class StandbyController:
    """The controller of this launcher's server: coordinates the job, is a candidate, or redirects other launchers.

    Methods are called by the serving thread and by the thread that searches for a coordinator. `controller` is None
    unless this launcher coordinates the job from the start.
    """

    def __init__(self, policy: MembershipPolicy, options: ElasticOptions, controller: ElasticController | None) -> None:
        self._policy, self._options = policy, options
        self._controller = controller
        self._candidacy: Candidacy | None = None
        self._leader = (-1, "")  # number and address of the machine that this launcher follows
        self._successor: tuple[int, str] | None = None  # number and address of the machine that has taken over
        self._job, self._number = "", -1
        self._nodes: dict[str, int] = {}  # machine numbers of followers during a candidacy, by node
        self._reports: list[tuple[str, Report]] = []  # reports received during a candidacy
        self._changing = threading.RLock()
        self.wake: Callable[[], None] = lambda: None

    @property
    def coordinates(self) -> bool:
        """Whether this launcher coordinates the job."""
        return self._controller is not None

    def running(self) -> JobRunning | None:
        """Returns the notice for launchers outside the job, or None if this launcher does not coordinate the job."""
        with self._changing:
            return self._controller.running() if self._controller is not None else None

    def warn_of_foreign_job(self, host: str) -> None:
        """Handles the unauthenticated report of a running job that has another secret."""
        with self._changing:
            is_new = self._controller is not None and self._controller.handle_foreign_job(host)
        if is_new:
            self.wake()

    def is_here(self, number: int) -> bool:
        """Returns True if this launcher coordinates the job and a machine is connected to it."""
        with self._changing:
            return self._controller is not None and self._controller.is_here(number)

    def takes_part(self, job: str, number: int) -> None:
        """Sets this launcher's job and machine number."""
        with self._changing:
            self._job, self._number = job, number

    def follows(self, number: int, address: str) -> None:
        """Sets the number (-1 for none) and the address of the machine that this launcher follows."""
        with self._changing:
            self._leader = (number, address)

    def stand(self, number: int, for_s: float) -> None:
        """Becomes a candidate for `for_s` seconds, unless this launcher is already a candidate or the coordinator."""
        with self._changing:
            if self._controller is None and self._candidacy is None:
                now_s = time.monotonic()
                self._number = number
                self._candidacy = Candidacy(now_s, now_s + for_s)
        self.wake()

    @property
    def deadline_s(self) -> float | None:
        """The time at which `tick` must be called, or None."""
        with self._changing:
            if self._candidacy is not None:
                return self._candidacy.deadline_s
            if self._controller is None:
                return None
            times_s = (self._controller.deadline_s, self._controller.resigns_s)
            return min((time_s for time_s in times_s if time_s is not None), default=None)

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Handles a report from another launcher."""
        with self._changing:
            if isinstance(report, JobRunning):
                return self._handle_running_job(node, report, now_s)
            if self._controller is not None and not (self._successor and isinstance(report, (Follow, JoinJob))):
                return self._with(self._controller.reported(node, report, now_s))
            if self._candidacy is None:
                return self._turn_away(node, report)
            self._reports.append((node, report))
            if not isinstance(report, Follow):
                return []
            followed = report.report
            if followed.job_state.job not in ("", self._job):
                return [(node, FollowResponse(False, -1, is_stranger=True)), (node, NodeDropped())]
            self._nodes = {name: number for name, number in self._nodes.items() if number != followed.number}
            self._nodes[node] = followed.number
            self._candidacy.follows(followed, now_s)
            welcome: list[tuple[str, Order]] = [(node, FollowResponse(True, self._number))]
            return welcome + self._consider(now_s)

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a launcher that has exited."""
        with self._changing:
            if self._controller is not None:
                return self._with(self._controller.ended(node, why, now_s))
            return self._gone(node, now_s)

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a launcher whose connection was lost."""
        with self._changing:
            if self._controller is not None:
                return self._with(self._controller.lost(node, why, now_s, silent_s))
            return self._gone(node, now_s)

    def tick(self, now_s: float) -> Orders:
        """Performs the work that is due."""
        with self._changing:
            if self._controller is None:
                return self._consider(now_s)
            controller = self._controller
            given, resigns_s = self._with(controller.tick(now_s)), controller.resigns_s
            if resigns_s is None or now_s < resigns_s:
                return given
            nodes, self._controller = controller.nodes, None
            return given + [(node, NodeDropped()) for node in nodes]

    def _handle_running_job(self, node: str, running: JobRunning, now_s: float) -> Orders:
        if running.job == (self._controller.identity if self._controller is not None else self._job):
            return [(node, FollowResponse(False, self._number))]
        return self._controller.handle_running_job(running, now_s) if self._controller is not None else []

    def _with(self, given: Orders) -> Orders:
        """Checks whether the coordinator has handed over, and returns the coordinator's orders unchanged."""
        controller = self._controller
        if controller is not None and controller.successor is not None:
            self._successor = controller.successor
            if controller.has_handed_over:
                self._controller = None
        return given

    def _turn_away(self, node: str, report: Report) -> Orders:
        """Redirects a launcher to the coordinator. Waits for a `Follow` if the launcher is already part of the job."""
        if not isinstance(report, Follow) and not (isinstance(report, JoinJob) and report.number < 0):
            return []
        return [(node, FollowResponse(False, *(self._successor or self._leader))), (node, NodeDropped())]

    def _gone(self, node: str, now_s: float) -> Orders:
        number = self._nodes.pop(node, None)
        self._reports = [entry for entry in self._reports if entry[0] != node]
        if number is not None and self._candidacy is not None:
            self._candidacy.left(number, now_s)
        return []

    def _consider(self, now_s: float) -> Orders:
        """Takes over as coordinator if elected; ends the candidacy if the election takes too long."""
        candidacy = self._candidacy
        if candidacy is None:
            return []
        if candidacy.is_elected(now_s):
            return self._take_office(candidacy, now_s)
        if candidacy.has_enough or now_s < candidacy.until_s:
            return []
        nodes = {node for node, _ in self._reports}
        self._candidacy, self._reports, self._nodes = None, [], {}
        return [(node, NodeDropped()) for node in nodes]

    def _take_office(self, candidacy: Candidacy, now_s: float) -> Orders:
        """Takes over the job based on the followers' reports, then handles the messages received after the reports."""
        reports, nodes = self._reports, self._nodes
        self._candidacy, self._reports, self._nodes = None, [], {}
        joins = {
            nodes[node]: (node, report) for node, report in reports if isinstance(report, JoinJob) and node in nodes
        }
        self._controller = ElasticController(self._policy, self._options, now_s)
        failures = [failure for node, report in reports if isinstance(report, Follow) for failure in report.failures]
        orders = self._controller.resume(self._number, candidacy.reports, joins, failures, now_s)
        for node, report in reports:
            is_new = node not in nodes and isinstance(report, JoinJob)
            if is_new or (node in nodes and not isinstance(report, (JoinJob, Follow))):
                orders += self._controller.reported(node, report, now_s)
        return orders
