"""Lets the coordinator of an elastic job decide in place of `Membership`, and speak to the meeting's nodes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from paceline.elastic import messages, orders
from paceline.elastic.coordinator import Coordinator
from paceline.elastic.election import knowledge_of
from paceline.elastic.knowledge import Report as MachineReport
from paceline.elastic.knowledge import next_term
from paceline.elastic.policy import Policy as CoordinatorPolicy
from paceline.launch.elastic.allotment import Machines
from paceline.launch.elastic.blame import Blame
from paceline.launch.elastic.departure import ORDERLY
from paceline.launch.elastic.notebook import report_in
from paceline.launch.elastic.options import ElasticOptions
from paceline.launch.failures import Failure, shortened
from paceline.launch.nodes.membership import Policy, misfit
from paceline.launch.nodes.messages import (
    Answered,
    Departing,
    Dropped,
    End,
    Fence,
    Follow,
    HandOver,
    Join,
    Know,
    Knows,
    Leave,
    Moved,
    Order,
    Remember,
    Report,
    Running,
    Slots,
    StopReplacing,
    TellWorker,
    Wait,
    WorkerEnded,
    WorkerSaid,
    WorkerStalled,
    WorkerStarted,
)
from paceline.launch.nodes.steering import Orders

_RETURN_PATIENCE_S = 2.0  # since a machine was heard of last
# A job that runs already calls at the address where the machines meet four times a second. Until the first view is
# given, workers start, which takes them about as long.
_QUIET_S = 2.0
_QUIET_SINCE_A_CALL_S = 5.0


@dataclass
class ElasticSteering:
    """The machines of an elastic job, and the failures that the user is shown if the job fails.

    It holds back the machines that come first until there are enough of them; the coordinator decides all the rest.
    """

    policy: Policy
    options: ElasticOptions
    started_s: float = 0.0
    successor: tuple[int, str] | None = None  # the machine that was told to coordinate, and its launcher's address
    identity: str = field(default_factory=lambda: secrets.token_hex(8))  # of the job
    _is_gathered: bool = False
    _has_spoken: bool = False  # a worker has said anything
    _blame: Blame = field(default_factory=Blame)
    _end: End | Moved | None = None
    _has_heard_of_another: bool = False
    _returning: dict[str, Join] = field(default_factory=dict)
    _quiet_until_s: float = 0.0

    def __post_init__(self) -> None:
        self._machines = Machines(is_lone=self.policy.max_nodes == 1)
        self._coordinator = self._make_coordinator(None)

    def _make_coordinator(self, home: str | None, term: int = 1, store: str = "") -> Coordinator:
        limits = CoordinatorPolicy(
            min_workers=self.options.min_workers,
            max_machines=self.policy.max_nodes,
            join_timeout_s=self.policy.join_timeout_s,
            quorum_timeout_s=self.policy.return_timeout_s,
            return_patience_s=_RETURN_PATIENCE_S,
            quiet_s=0.0 if self.policy.max_nodes == 1 else _QUIET_S,
        )
        return Coordinator(limits, self.started_s, term, home=home, store=store, identity=self.identity)

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called; None for never."""
        if self._end is not None:
            return None
        if not self._is_gathered:
            return self.started_s + self.policy.join_timeout_s
        return self._coordinator.deadline_s

    @property
    def lacks_quorum_s(self) -> float | None:
        """Since when the coordinator waits for machines without which it may not decide; None if it does not."""
        return self._coordinator.lacks_quorum_s if self._is_gathered and self._end is None else None

    @property
    def nodes(self) -> list[str]:
        """The machines that are connected."""
        return list(self._machines.here)

    @property
    def has_handed_over(self) -> bool:
        """Whether all have been told that another launcher coordinates."""
        retirement = self._coordinator.retirement
        return retirement is not None and retirement.is_over

    def resume(
        self,
        home: int,
        reports: Mapping[int, MachineReport],
        joins: Mapping[int, tuple[str, Join]],
        failures: Iterable[Failure],
        now_s: float,
    ) -> Orders:
        """Takes over a job from the machines that follow this launcher.

        Args:
            home: the number of this launcher's machine.
            reports: of the machines, by number.
            joins: by machine, its node and how it introduced itself.
            failures: that any of them knows of.
            now_s: the time.
        """
        machines, known = self._machines, knowledge_of(reports.values())
        machines.home, self._is_gathered, self._has_spoken, self.identity = home, True, True, known.job
        for number, report in reports.items():
            machines.returns(*joins[number], report)
        machines.count = 1 + max([*(peer.number for peer in known.peers), *known.ended, *reports])
        self._coordinator = self._make_coordinator(str(home), next_term(known.term, home), machines.store() or "")
        addresses = {number: join.listens for number, (_, join) in joins.items()}
        stores = {each.number: machines.served_by(each) for each in machines.here.values()}
        given = self._coordinator.resume(list(reports.values()), now_s, addresses, stores)
        return [*self._learn_of(failures), *self._carry(given)]

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""
        if isinstance(report, Join):
            return self._joined(node, report, now_s)
        if isinstance(report, Follow):
            return self._returned(node, report, now_s)
        if self._end is not None or node not in self._machines.here:
            return []
        name = self._machines.name(node)
        match report:
            case WorkerStarted(uid):
                return self._carry(self._coordinator.worker_started(uid, name, now_s))
            case Knows(generation):
                return self._carry(self._coordinator.machine_knows(name, generation, now_s))
            case WorkerStalled(uid, why):
                return self._carry(self._coordinator.worker_stalled(uid, why, now_s))
            case WorkerEnded(uid, how, exit_code):
                return self._carry(self._coordinator.worker_ended(uid, how, exit_code, now_s))
            case WorkerSaid(uid, body):
                return self._said(node, uid, body, now_s)
            case Slots():
                return self._slots_changed(node, report, now_s)
            case Departing():
                return self._carry(self._coordinator.machine_leaves(name, now_s))
            case Leave(reason):
                return self._left(node, reason, now_s)
        return []

    def running(self) -> Running | None:
        """Returns what a launcher that has not heard of this job is told of it; None when that is over."""
        if self._end is not None:
            return None
        is_sure = self._is_gathered and self._coordinator.lacks_quorum_s is None
        return Running(self.identity, self._machines.listens(self._machines.home) if is_sure else "")

    def is_here(self, number: int) -> bool:
        """Returns whether a machine is connected."""
        return any(each.number == number for each in self._machines.here.values())

    def heard_of(self, other: Running, now_s: float) -> Orders:
        """Lets this job give way to one that runs already, or wait until that has found a coordinator."""
        if self._end is not None:
            return []
        if other.address:
            self._end = Moved(other.job, other.address)
            return [(node, self._end) for node in self._machines.here]
        self._quiet_until_s = now_s + _QUIET_SINCE_A_CALL_S
        is_held_back = self._coordinator.hold_back(self._quiet_until_s)
        if self._has_heard_of_another or not is_held_back:
            return []
        self._has_heard_of_another = True
        text = "a job of this address runs already, and looks for a coordinator; waiting for it"
        return [(node, Wait(text)) for node in self._machines.here]

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has ended: the kernel has killed its workers."""
        machine = self._machines.here.pop(node, None)
        if machine is None or machine.first_slot is None or self._end is not None:
            return []
        return self._carry(self._coordinator.machine_left(str(machine.number), why, now_s))

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Notes that a node's connection has ended, or that it fell silent."""
        if self._end is not None or (machine := self._machines.here.pop(node, None)) is None:
            return []
        if machine.first_slot is None:
            return []
        self._machines.away.append(machine)
        return self._carry(self._coordinator.machine_lost(str(machine.number), why, now_s, silent_s))

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        if self._end is not None:
            return []
        if self._is_gathered:
            return self._carry(self._coordinator.tick(now_s))
        if now_s < self.started_s + self.policy.join_timeout_s:
            return []
        hosts = [each.join.host for each in self._machines.here.values()]
        return self._over(
            End(
                1,
                f"waited {self.policy.join_timeout_s:.0f} s for {self.policy.min_nodes} machines; "
                f"{len(hosts)} came ({', '.join(hosts) or 'none'}). Look at the output of the others; --rdzv-conf "
                "join_timeout=SECONDS waits on",
            )
        )

    def _said(self, node: str, uid: str, body: str, now_s: float) -> Orders:
        self._has_spoken = True
        try:
            message = messages.from_worker(body.encode())
        except ValueError as error:  # every launcher checks what it passes on
            return self.lost(node, f"its launcher passed on what is no message ({error})", now_s)
        return self._carry(self._coordinator.worker_said(uid, message, now_s))

    def _joined(self, node: str, join: Join, now_s: float) -> Orders:
        if wrong := misfit(join, is_elastic=True):
            return [(node, End(2, wrong))]
        if join.number >= 0:
            self._returning[node] = join
            return []
        if isinstance(self._end, Moved):
            return [(node, self._end)]
        if self._end is not None:
            return [(node, End(self._end.code if join.job == self.identity else 1, "the job is over"))]
        self._machines.add(node, join)
        if self._is_gathered:
            return self._take_in(node, now_s)
        machines, wanted = self._machines, self.policy.min_nodes
        if len(machines.here) < wanted or machines.store() is None:
            return [(node, Wait(f"{len(machines.here)} of {wanted} machines are here; waiting for the others"))]
        self._is_gathered = True
        machines.home = next(each.number for each in machines.here.values() if each.join.serves)
        if not machines.is_lone:
            self._coordinator = self._make_coordinator(str(machines.home), store=machines.store() or "")
            self._coordinator.hold_back(self._quiet_until_s)
        return [order for each in list(machines.here) for order in self._take_in(each, now_s)]

    def _take_in(self, node: str, now_s: float) -> Orders:
        machine, name, coordinator = self._machines.here[node], self._machines.name(node), self._coordinator
        host, where, store = machine.join.host, machine.join.listens, self._machines.served_by(machine)
        given = coordinator.machine_joined(name, host, machine.slots, now_s, where, store)
        return [*self._remember(node), *self._carry([*given, *coordinator.machine_listed(name, now_s)])]

    def _returned(self, node: str, follow: Follow, now_s: float) -> Orders:
        """Takes in a machine that was out of reach, or followed another launcher."""
        join, report = self._returning.pop(node, None), report_in(follow)
        if join is None or report is None:
            return []
        if report.knowledge.job not in ("", self.identity):
            waits = self.heard_of(Running(report.knowledge.job), now_s)
            return [*waits, (node, Answered(False, -1, is_stranger=True)), (node, Dropped())]
        if self._end is not None:
            return [(node, self._end)]
        machines = self._machines
        store = machines.served_by(machines.returns(node, join, report))
        told = [*self._learn_of(follow.failures), *self._remember(node)]
        given = self._coordinator.machine_returned(report, now_s, join.listens, store)
        return [(node, Answered(True, machines.home)), *told, *self._carry(given)]

    def _slots_changed(self, node: str, report: Slots, now_s: float) -> Orders:
        machines = self._machines
        machines.here[node].slots = report.count
        told = self._learn_of(report.failures)
        is_over = not any(each.slots for each in machines.here.values())
        if is_over and not self._blame.failures and not self._has_spoken:
            return self._over(End(0))  # the script has no elastic loop, and has come to its end
        return [*told, *self._carry(self._coordinator.slots_changed(machines.name(node), report.count, now_s))]

    def _learn_of(self, failures: Iterable[Failure]) -> Orders:
        """Notes failures, and has every machine remember them for the case that this launcher is lost."""
        is_new = self._blame.add(failures)
        return [order for node in self._machines.here for order in self._remember(node)] if is_new else []

    def _remember(self, node: str) -> Orders:
        is_kept = self._blame.failures and not self._machines.is_lone
        return [(node, Remember(self._blame.failures))] if is_kept else []

    def _left(self, node: str, reason: str, now_s: float) -> Orders:
        machine = self._machines.here[node]
        if machine.number == self._machines.home or (machine.join.serves and not self._is_gathered):
            return self._over(End(1, f"{machine.join.host} was stopped ({reason})"))
        del self._machines.here[node]
        left = self._coordinator.machine_left(str(machine.number), reason, now_s, has_said_so=True)
        return [(node, End(0 if reason == ORDERLY.name else 1)), *self._carry(left)]

    def _carry(self, given: orders.Orders) -> Orders:
        """Returns the coordinator's orders as the nodes take them."""
        carried: Orders = []
        nodes = self._machines.nodes()
        for order in given:
            match order:
                case orders.Tell(name, uid, message) if name in nodes:
                    carried.append((nodes[name], TellWorker(uid, messages.encode(message).decode())))
                case orders.Know(name, knowledge) if name in nodes:
                    carried.append((nodes[name], Know(msgspec.json.encode(knowledge).decode())))
                case orders.Begin(name) if name in nodes:
                    carried.append((nodes[name], self._machines.begin(nodes[name], self.policy.run_id)))
                case orders.HandOver(name, to) if name in nodes:
                    carried.append((nodes[name], self._hand_over(int(name), to)))
                case orders.Fence(name, uid) if name in nodes:
                    carried.append((nodes[name], Fence(uid)))
                case orders.StopReplacing(name, reason) if name in nodes:
                    carried.append((nodes[name], StopReplacing(reason)))
                case orders.Say(text):
                    carried += [(each, Wait(text)) for each in self._machines.here]
                case orders.End(code, reason):
                    carried += self._over(End(code, reason))
        return carried

    def _hand_over(self, number: int, to: int) -> Order:
        """Returns what a machine is told when another coordinates from now on; this one is told that it may end."""
        if self.successor is None or self.successor[0] != to:
            self.successor = to, self._machines.listens(to)
        is_home = number == self._machines.home
        return End(0, f"machine {to} coordinates from now on") if is_home else HandOver(*self.successor)

    def _over(self, end: End) -> Orders:
        if self._end is not None:
            return []
        self._end = End(end.code, end.reason, shortened(self._blame.failures) if end.code else ())
        return [(node, self._end) for node in self._machines.here]
