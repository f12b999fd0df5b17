"""Lets the coordinator of an elastic job decide in place of `Membership`, and speak to the meeting's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from paceline.elastic import messages, orders
from paceline.elastic.coordinator import Coordinator
from paceline.elastic.election import knowledge_of
from paceline.elastic.knowledge import Report as MachineReport
from paceline.elastic.knowledge import next_term
from paceline.elastic.policy import Policy as CoordinatorPolicy
from paceline.launch.elastic.options import ElasticOptions
from paceline.launch.failures import Failure, shortened
from paceline.launch.nodes.membership import Policy, misfit
from paceline.launch.nodes.messages import (
    Answered,
    Begin,
    End,
    Follow,
    Join,
    Know,
    Knows,
    Leave,
    Report,
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


@dataclass
class _Machine:
    """A node: what it said when it came, its number, and its first slot once it has begun."""

    join: Join
    number: int
    slots: int
    first_slot: int | None = None


@dataclass
class ElasticSteering:
    """The machines of an elastic job, and the failures that the user is shown if the job fails.

    It holds back the machines that come first until there are enough of them; the coordinator decides all the rest.
    """

    policy: Policy
    options: ElasticOptions
    started_s: float = 0.0
    _machines: dict[str, _Machine] = field(default_factory=dict)  # by node
    _count: int = 0
    _is_gathered: bool = False
    _has_spoken: bool = False  # a worker has said anything
    _failures: list[Failure] = field(default_factory=list)
    _end: End | None = None
    _home: int = -1  # the machine that this launcher is on, once the machines have gathered
    _away: list[_Machine] = field(default_factory=list)  # those that are lost, and keep their slots
    _returning: dict[str, Join] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._coordinator = self._make_coordinator(None)

    def _make_coordinator(self, home: str | None, term: int = 1, store: str = "") -> Coordinator:
        limits = CoordinatorPolicy(
            min_workers=self.options.min_workers,
            max_machines=self.policy.max_nodes,
            join_timeout_s=self.policy.join_timeout_s,
            quorum_timeout_s=self.policy.return_timeout_s,
            return_patience_s=_RETURN_PATIENCE_S,
        )
        return Coordinator(limits, self.started_s, term, home=home, store=store)

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
        return list(self._machines)

    def resume(
        self, home: int, reports: Mapping[int, MachineReport], joins: Mapping[int, tuple[str, Join]], now_s: float
    ) -> Orders:
        """Takes over a job from the machines that follow this launcher.

        Args:
            home: the number of this launcher's machine.
            reports: of the machines, by number.
            joins: by machine, its node and how it introduced itself.
            now_s: the time.
        """
        self._home, self._is_gathered, self._has_spoken = home, True, True
        for number, report in reports.items():
            node, join = joins[number]
            self._machines[node] = _Machine(join, number, report.slots, report.first_slot)
        known = knowledge_of(reports.values())
        self._count = 1 + max([*(peer.number for peer in known.peers), *reports])
        term = next_term(known.term, home)
        self._coordinator = self._make_coordinator(str(home), term, self._served_by(joins[home][1]))
        addresses = {number: join.listens for number, (_, join) in joins.items()}
        return self._carry(self._coordinator.resume(list(reports.values()), now_s, addresses))

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""
        if isinstance(report, Join):
            return self._joined(node, report, now_s)
        if isinstance(report, Follow):
            return self._returned(node, report, now_s)
        if self._end is not None or node not in self._machines:
            return []
        name = self._name(node)
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
            case Leave(reason):
                return self._left(node, reason, now_s)
        return []

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has ended: the kernel has killed its workers."""
        machine = self._machines.pop(node, None)
        if machine is None or machine.first_slot is None or self._end is not None:
            return []
        return self._carry(self._coordinator.machine_left(str(machine.number), why, now_s))

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Notes that a node's connection has ended, or that it fell silent."""
        machine = self._machines.get(node)
        if machine is None or self._end is not None:
            return []
        del self._machines[node]
        if machine.first_slot is None:
            return []
        self._away.append(machine)
        return self._carry(self._coordinator.machine_lost(str(machine.number), why, now_s, silent_s))

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        if self._end is not None:
            return []
        if self._is_gathered:
            return self._carry(self._coordinator.tick(now_s))
        if now_s < self.started_s + self.policy.join_timeout_s:
            return []
        here = ", ".join(each.join.host for each in self._machines.values()) or "none"
        return self._over(
            End(
                1,
                f"waited {self.policy.join_timeout_s:.0f} s for {self.policy.min_nodes} machines; "
                f"{len(self._machines)} came ({here}). Look at the output of the others; --rdzv-conf "
                "join_timeout=SECONDS waits on",
            )
        )

    def _said(self, node: str, uid: str, body: str, now_s: float) -> Orders:
        self._has_spoken = True
        try:
            message = messages.from_worker(body.encode())
        except (msgspec.ValidationError, msgspec.DecodeError) as error:  # every launcher checks what it passes on
            return self.lost(node, f"its launcher passed on what is no message ({error})", now_s)
        return self._carry(self._coordinator.worker_said(uid, message, now_s))

    def _joined(self, node: str, join: Join, now_s: float) -> Orders:
        if self._end is not None:
            return [(node, End(1, "the job is over"))]
        if wrong := misfit(join, is_elastic=True):
            return [(node, End(2, wrong))]
        if join.number >= 0:
            self._returning[node] = join
            return []
        self._machines[node] = _Machine(join, self._count, join.workers)
        self._count += 1
        if self._is_gathered:
            return self._hand_over(node, now_s)
        here, wanted = len(self._machines), self.policy.min_nodes
        if here < wanted or self._store() is None:
            return [(node, Wait(f"{here} of {wanted} machines are here; waiting for the others"))]
        self._is_gathered = True
        self._home = next(each.number for each in self._machines.values() if each.join.serves)
        if self.policy.max_nodes > 1:
            self._coordinator = self._make_coordinator(str(self._home), store=self._store() or "")
        return [order for each in list(self._machines) for order in self._hand_over(each, now_s)]

    def _hand_over(self, node: str, now_s: float) -> Orders:
        machine, name = self._machines[node], self._name(node)
        given = self._coordinator.machine_joined(name, machine.join.host, machine.slots, now_s, machine.join.listens)
        return self._carry([*given, *self._coordinator.machine_listed(name, now_s)])

    def _returned(self, node: str, follow: Follow, now_s: float) -> Orders:
        """Takes in a machine that was out of reach, or followed another launcher."""
        join, report = self._returning.pop(node, None), report_in(follow)
        if join is None or report is None:
            return []
        if self._end is not None:
            return [(node, self._end)]
        for before in [each for each, machine in self._machines.items() if machine.number == report.number]:
            del self._machines[before]
        self._away = [each for each in self._away if each.number != report.number]
        self._machines[node] = _Machine(join, report.number, report.slots, report.first_slot)
        given = self._carry(self._coordinator.machine_returned(report, now_s, join.listens))
        return [(node, Answered(True, self._home)), *given]

    def _name(self, node: str) -> str:
        return str(self._machines[node].number)

    def _store(self) -> str | None:
        """Returns where the workers' store is served; None while the machine that serves it is not here."""
        if self._home >= 0:
            serving = next((each.join for each in self._machines.values() if each.number == self._home), None)
        else:
            serving = next((each.join for each in self._machines.values() if each.join.serves), None)
        return None if serving is None else self._served_by(serving)

    def _served_by(self, join: Join) -> str:
        return "" if self.policy.max_nodes == 1 else f"tcp:{_bracketed(join.address)}:{join.port}"

    def _slots_changed(self, node: str, report: Slots, now_s: float) -> Orders:
        machine = self._machines[node]
        machine.slots = report.count
        known = {(each.host, each.pid) for each in self._failures}
        self._failures += [each for each in report.failures if (each.host, each.pid) not in known]
        is_over = not any(each.slots for each in self._machines.values())
        if is_over and not self._failures and not self._has_spoken:
            return self._over(End(0))  # the script has no elastic loop, and has come to its end
        return self._carry(self._coordinator.slots_changed(self._name(node), report.count, now_s))

    def _left(self, node: str, reason: str, now_s: float) -> Orders:
        machine = self._machines[node]
        if machine.number == self._home or (machine.join.serves and not self._is_gathered):
            return self._over(End(1, f"{machine.join.host} was stopped ({reason})"))
        del self._machines[node]
        return [(node, End(1)), *self._carry(self._coordinator.machine_left(str(machine.number), reason, now_s))]

    def _carry(self, given: orders.Orders) -> Orders:
        """Returns the coordinator's orders as the nodes take them."""
        carried: Orders = []
        nodes = {str(machine.number): node for node, machine in self._machines.items()}
        for order in given:
            match order:
                case orders.Tell(name, uid, message) if name in nodes:
                    carried.append((nodes[name], TellWorker(uid, messages.encode(message).decode())))
                case orders.Know(name, knowledge) if name in nodes:
                    carried.append((nodes[name], Know(msgspec.json.encode(knowledge).decode())))
                case orders.Begin(name) if name in nodes:
                    carried.append((nodes[name], self._begin(nodes[name])))
                case orders.StopReplacing(name, reason) if name in nodes:
                    carried.append((nodes[name], StopReplacing(reason)))
                case orders.Say(text):
                    carried += [(each, Wait(text)) for each in self._machines]
                case orders.End(code, reason):
                    carried += self._over(End(code, reason))
        return carried

    def _begin(self, node: str) -> Begin:
        machine = self._machines[node]
        taken = sorted(
            (each.first_slot, each.first_slot + each.join.workers)
            for each in [*self._machines.values(), *self._away]
            if each.first_slot is not None
        )
        first = 0
        for begin, end in taken:
            if first + machine.join.workers <= begin:
                break
            first = max(first, end)
        machine.first_slot = first
        ends = [end for _, end in taken]
        slots = max(sum(each.join.workers for each in self._machines.values()), first + machine.join.workers, *ends, 0)
        return Begin(machine.number, first, slots, self.policy.run_id, self._store() or "")

    def _over(self, end: End) -> Orders:
        if self._end is not None:
            return []
        self._end = End(end.code, end.reason, shortened(self._failures) if end.code else ())
        return [(node, self._end) for node in self._machines]


def report_in(follow: Follow) -> MachineReport | None:
    """Returns a machine's report; None if it is none, so that the machine gets no answer."""
    try:
        return msgspec.json.decode(follow.body, type=MachineReport)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
