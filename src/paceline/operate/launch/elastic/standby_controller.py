"""What a launcher of an elastic job answers to other launchers: where the coordinator is, or that it is here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.operate.launch.elastic.elastic_controller import ElasticController
from paceline.operate.launch.elastic.elastic_options import ElasticOptions
from paceline.operate.launch.multinode.membership import MembershipPolicy, Orders
from paceline.operate.launch.multinode.protocol import Answered, Dropped, Follow, JoinJob, Order, Report, Running
from paceline.train.elastic.coordinator.election import Candidacy

RESIGN_S = 2.0  # a coordinator that lacks a quorum for so long looks for another


class StandbyController:
    """Steers the meeting that this launcher serves to others: it coordinates, stands for it, or shows where others do.

    It is called by the thread that serves, and by the one that looks for a coordinator.

    Args:
        policy: of the meeting.
        options: of the job.
        steering: if this launcher coordinates the job from the beginning.
    """

    def __init__(self, policy: MembershipPolicy, options: ElasticOptions, steering: ElasticController | None) -> None:
        self._policy, self._options = policy, options
        self._steering = steering
        self._candidacy: Candidacy | None = None
        self._leader = (-1, "")  # whom this launcher follows, if it is another
        self._successor: tuple[int, str] | None = None  # to whom it has handed the job over, since it ends
        self._job, self._number = "", -1
        self._nodes: dict[str, int] = {}  # the machines of those that follow a candidate
        self._said: list[tuple[str, Report]] = []  # to a candidate
        self._orders: Orders = []
        self._changing = threading.RLock()
        self.wake: Callable[[], None] = lambda: None

    @property
    def coordinates(self) -> bool:
        """Whether this launcher coordinates the job."""
        return self._steering is not None

    def running(self) -> Running | None:
        """Returns what a launcher that has not heard of the job is told, if this one coordinates it."""
        with self._changing:
            return self._steering.running() if self._steering is not None else None

    def is_here(self, number: int) -> bool:
        """Returns whether this launcher coordinates the job, and that machine's is connected to it."""
        with self._changing:
            return self._steering is not None and self._steering.is_here(number)

    def takes_part(self, job: str, number: int) -> None:
        """Notes as which machine, and in which job, this launcher takes part."""
        with self._changing:
            self._job, self._number = job, number

    def follows(self, number: int, address: str) -> None:
        """Notes whom this launcher follows; -1 for nobody."""
        with self._changing:
            self._leader = (number, address)

    def stand(self, number: int, for_s: float) -> None:
        """Lets other launchers follow this one, machine `number`, for so many seconds, unless it coordinates."""
        with self._changing:
            if self._steering is None and self._candidacy is None:
                now_s = time.monotonic()
                self._number = number
                self._candidacy = Candidacy(now_s, now_s + for_s)
        self.wake()

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called; None for never."""
        with self._changing:
            if self._candidacy is not None:
                return self._candidacy.deadline_s
            if self._steering is None:
                return None
            times_s = [self._steering.deadline_s]
            if self._steering.lacks_quorum_s is not None:
                times_s.append(self._steering.lacks_quorum_s + RESIGN_S)
            return min((each for each in times_s if each is not None), default=None)

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes another launcher's report."""
        with self._changing:
            if isinstance(report, Running):
                return self._heard_of(node, report, now_s)
            if self._steering is not None and not (self._successor and isinstance(report, (Follow, JoinJob))):
                return self._with(self._steering.reported(node, report, now_s))
            if self._candidacy is None:
                return self._turn_away(node, report)
            self._said.append((node, report))
            if not isinstance(report, Follow):
                return []
            followed = report.report
            if followed.knowledge.job not in ("", self._job):
                return [(node, Answered(False, -1, is_stranger=True)), (node, Dropped())]
            self._nodes = {name: number for name, number in self._nodes.items() if number != followed.number}
            self._nodes[node] = followed.number
            self._candidacy.follows(followed, now_s)
            welcome: list[tuple[str, Order]] = [(node, Answered(True, self._number))]
            return welcome + self._consider(now_s)

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a launcher that has ended."""
        with self._changing:
            if self._steering is not None:
                return self._with(self._steering.ended(node, why, now_s))
            return self._gone(node, now_s)

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a launcher whose connection was lost."""
        with self._changing:
            if self._steering is not None:
                return self._with(self._steering.lost(node, why, now_s, silent_s))
            return self._gone(node, now_s)

    def tick(self, now_s: float) -> Orders:
        """Does what is due."""
        with self._changing:
            if self._steering is None:
                return self._consider(now_s)
            steering = self._steering
            given, lacks_s = self._with(steering.tick(now_s)), steering.lacks_quorum_s
            if lacks_s is None or now_s < lacks_s + RESIGN_S:
                return given
            nodes, self._steering = steering.nodes, None
            return given + [(node, Dropped()) for node in nodes]

    def _heard_of(self, node: str, running: Running, now_s: float) -> Orders:
        if running.job == (self._steering.identity if self._steering is not None else self._job):
            return [(node, Answered(False, self._number))]
        return self._steering.heard_of(running, now_s) if self._steering is not None else []

    def _with(self, given: Orders) -> Orders:
        """Notes whether the coordinator, which has given these orders, has handed its office over."""
        steering = self._steering
        if steering is not None and steering.successor is not None:
            self._successor = steering.successor
            if steering.has_handed_over:
                self._steering = None
        return given

    def _turn_away(self, node: str, report: Report) -> Orders:
        """Shows a launcher where the coordinator is; one that takes part already says more after its Join."""
        if not isinstance(report, Follow) and not (isinstance(report, JoinJob) and report.number < 0):
            return []
        return [(node, Answered(False, *(self._successor or self._leader))), (node, Dropped())]

    def _gone(self, node: str, now_s: float) -> Orders:
        number = self._nodes.pop(node, None)
        self._said = [each for each in self._said if each[0] != node]
        if number is not None and self._candidacy is not None:
            self._candidacy.left(number, now_s)
        return []

    def _consider(self, now_s: float) -> Orders:
        """Coordinates from now on if this launcher is elected; stands no more if that takes too long."""
        candidacy = self._candidacy
        if candidacy is None:
            return []
        if candidacy.is_elected(now_s):
            return self._take_office(candidacy, now_s)
        if candidacy.has_enough or now_s < candidacy.until_s:
            return []
        nodes = {node for node, _ in self._said}
        self._candidacy, self._said, self._nodes = None, [], {}
        return [(node, Dropped()) for node in nodes]

    def _take_office(self, candidacy: Candidacy, now_s: float) -> Orders:
        """Takes over the job from what the followers have reported, and hears what they have said since."""
        said, nodes = self._said, self._nodes
        self._candidacy, self._said, self._nodes = None, [], {}
        joins = {nodes[node]: (node, report) for node, report in said if isinstance(report, JoinJob) and node in nodes}
        self._steering = ElasticController(self._policy, self._options, now_s)
        failures = [each for node, report in said if isinstance(report, Follow) for each in report.failures]
        orders = self._steering.resume(self._number, candidacy.reports, joins, failures, now_s)
        for node, report in said:
            is_new = node not in nodes and isinstance(report, JoinJob)
            if is_new or (node in nodes and not isinstance(report, (JoinJob, Follow))):
                orders += self._steering.reported(node, report, now_s)
        return orders
