"""`ElasticController`: adapts an elastic job's coordinator to the rendezvous's controller protocol.

The coordinator identifies a machine by its number, and the rendezvous identifies it by its node. The controller
translates between the two, and `MachineRegistry` assigns slots and stores. `ShutdownPlan` determines the final reports
and the exit code of a launcher that was asked to exit.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.operate.launch.elastic.machine_log import ReportedFailures
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.failures import WorkerFailure, shortened
from paceline.operate.launch.multinode.membership import (
    MembershipPolicy,
    Orders,
    gathering_notice,
    gathering_timeout,
    incompatibility,
)
from paceline.operate.launch.multinode.protocol import (
    ExitNotice,
    Follow,
    FollowLauncher,
    FollowResponse,
    JobEnded,
    JobMoved,
    JobRunning,
    JoinJob,
    NodeDropped,
    NodeStopped,
    Order,
    RecordFailures,
    Report,
    Slots,
    StartSlots,
    StateReplicated,
    WorkerExited,
    WorkerMessage,
    WorkerStalled,
    WorkerStarted,
)
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.coordinator.election import merge_reports
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    CoordinatorOrder,
    CoordinatorOrders,
    EndOrder,
    FenceStalledOrder,
    HandoverOrder,
    MachineReport,
    NotifyOrder,
    ReplicateOrder,
    SendOrder,
    StartOrder,
    next_term,
)


@dataclass
class ConnectedMachine:
    """A connected node: its `JoinJob`, its machine number, and its first slot once the node has started."""

    join: JoinJob
    number: int
    slots: int
    first_slot: int | None = None

    @property
    def store(self) -> str:
        """The address of the store that the machine's launcher serves to workers on other machines."""
        host = self.join.address
        return f"tcp:[{host}]:{self.join.port}" if ":" in host else f"tcp:{host}:{self.join.port}"


@dataclass
class MachineRegistry:
    """The machines in the job, each with a unique number."""

    is_lone: bool  # whether the job is limited to a single machine
    here: dict[str, ConnectedMachine] = field(default_factory=dict)  # the connected machines, by node
    away: list[ConnectedMachine] = field(default_factory=list)  # the lost machines, whose slots remain reserved
    count: int = 0  # the number of machine numbers assigned so far
    home: int = -1  # the number of the coordinator's machine, or -1 until enough machines have joined

    def add(self, node: str, join: JoinJob) -> ConnectedMachine:
        """Adds a machine that joins for the first time."""
        self.here[node] = found = ConnectedMachine(join, self.count, join.workers)
        self.count += 1
        return found

    def returns(self, node: str, join: JoinJob, report: MachineReport) -> ConnectedMachine:
        """Adds a machine that has reconnected."""
        self.here = {name: machine for name, machine in self.here.items() if machine.number != report.number}
        self.away = [machine for machine in self.away if machine.number != report.number]
        self.here[node] = found = ConnectedMachine(join, report.number, report.slots, report.first_slot)
        return found

    def name(self, node: str) -> str:
        """Returns the coordinator's name for a node: its machine number as text."""
        return str(self.here[node].number)

    def nodes(self) -> dict[str, str]:
        """Returns the nodes of connected machines, keyed by the coordinator's name for each."""
        return {str(machine.number): node for node, machine in self.here.items()}

    def listens(self, number: int) -> str:
        """Returns the address at which other launchers can reach a machine's launcher, or "" if unknown."""
        machines = [*self.here.values(), *self.away]
        return next((machine.join.listens for machine in machines if machine.number == number), "")

    def store(self) -> str | None:
        """Returns the address of the workers' store, or None while the machine that serves it is disconnected."""
        found = (machine for machine in self.here.values() if self.home in (-1, machine.number))
        serving = next((machine for machine in found if machine.join.serves or machine.number == self.home), None)
        return None if serving is None else self.served_by(serving)

    def served_by(self, machine: ConnectedMachine) -> str:
        """Returns the address of the store on a machine; "" if the machine is alone."""
        return "" if self.is_lone else machine.store

    def begin(self, node: str, run_id: str) -> StartSlots:
        """Assigns the first free slots to a machine. Slots of lost machines are not free."""
        machine = self.here[node]
        taken = sorted(
            (other.first_slot, other.first_slot + other.join.workers)
            for other in [*self.here.values(), *self.away]
            if other.first_slot is not None
        )
        first = 0
        for begin, end in taken:
            if first + machine.join.workers <= begin:
                break
            first = max(first, end)
        machine.first_slot = first
        ends = [end for _, end in taken]
        slots = max(sum(other.join.workers for other in self.here.values()), first + machine.join.workers, *ends, 0)
        return StartSlots(machine.number, first, slots, run_id, self.store() or "")


ORDERLY_SIGNAL = signal.SIGTERM  # the machine leaves at the end of a step, which is not a failure


@dataclass
class ShutdownPlan:
    """State machine for the shutdown of this launcher. Uses neither processes nor a clock."""

    is_shared: bool  # whether the job may include other machines
    number: signal.Signals | None = None  # the signal that requested the shutdown
    insists: bool = False  # whether a second signal has arrived
    took_part: bool = False  # whether a worker on this machine has entered a view
    has_left: bool = False  # whether this launcher has reported to the coordinator that its workers have exited

    def announced(self) -> list[Report]:
        """Returns the reports to send to the coordinator after the first signal."""
        return [ExitNotice()] if self.number == ORDERLY_SIGNAL else []

    def hands_over(self, coordinates: bool) -> bool:
        """Returns True if this launcher must hand over the coordination before it exits."""
        return coordinates and self.number == ORDERLY_SIGNAL and not self.insists

    def farewell(self, coordinates: bool) -> list[Report]:
        """Returns the final reports for the coordinator once no worker is left; later calls return an empty list."""
        if self.number is None or self.has_left or self.hands_over(coordinates):
            return []
        self.has_left = True
        return [NodeStopped(self.number.name)]

    def is_well(self, code: int) -> bool:
        """Returns True if the shutdown was orderly, given the exit code of the job."""
        has_gone = self.is_shared and (self.has_left or self.took_part)
        return code == 0 and self.number == ORDERLY_SIGNAL and not self.insists and has_gone


_RETURN_PATIENCE_S = 2.0  # time to wait for a machine to reconnect after the last contact
# Time to wait for announcements of a running job, which arrive at the rendezvous address four times per second. The
# wait costs little, because workers take about as long to start.
_QUIET_S = 2.0
_QUIET_SINCE_A_CALL_S = 5.0
_MAX_FOREIGN_HOSTS = 3  # anyone can report a job with another secret, so only the first hosts are recorded and printed


@dataclass
class ElasticController:
    """The controller of an elastic job, with its machines and the failures for the final report.

    The controller waits until enough machines have joined; the coordinator makes all other decisions.
    """

    policy: MembershipPolicy
    options: ElasticOptions
    started_s: float = 0.0
    successor: tuple[int, str] | None = None  # machine ordered to take over, with its launcher's address
    identity: str = field(default_factory=lambda: secrets.token_hex(8))  # random, unique for each job
    _is_gathered: bool = False
    _has_spoken: bool = False  # whether a worker has ever sent a message
    _blame: ReportedFailures = field(default_factory=ReportedFailures)
    _end: JobEnded | JobMoved | None = None
    _has_found_another_job: bool = False
    _foreign_hosts: list[str] = field(default_factory=list)  # hosts that reported a running job with another secret
    _printed_hosts: int = 0  # number of entries of `_foreign_hosts` that have been printed
    _returning: dict[str, JoinJob] = field(default_factory=dict)
    _quiet_until_s: float = 0.0

    def __post_init__(self) -> None:
        self._machines = MachineRegistry(is_lone=self.policy.max_nodes == 1)
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
        """The time at which `tick` must be called, or None."""
        if self._end is not None:
            return None
        if not self._is_gathered:
            return self.started_s + self.policy.join_timeout_s
        return self._coordinator.deadline_s

    @property
    def resigns_s(self) -> float | None:
        """The time at which this launcher must search for another coordinator, or None while it coordinates."""
        return self._coordinator.resigns_s if self._is_gathered and self._end is None else None

    @property
    def nodes(self) -> list[str]:
        """The connected nodes."""
        return list(self._machines.here)

    @property
    def has_handed_over(self) -> bool:
        """Whether all machines have been ordered to follow another launcher."""
        retirement = self._coordinator.retirement
        return retirement is not None and retirement.is_over

    def resume(
        self,
        home: int,
        reports: Mapping[int, MachineReport],
        joins: Mapping[int, tuple[str, JoinJob]],
        failures: Iterable[WorkerFailure],
        now_s: float,
    ) -> Orders:
        """Takes over a job, and restores its state from the reports of the machines that follow this launcher.

        `home` is the number of this machine. The keys of `reports` and `joins` are machine numbers. `joins` contains
        the node and the `JoinJob` of each machine, and `failures` contains the failures that the machines have
        recorded.
        """
        machines, known = self._machines, merge_reports(reports.values())
        machines.home, self._is_gathered, self._has_spoken, self.identity = home, True, True, known.job
        for number, report in reports.items():
            machines.returns(*joins[number], report)
        machines.count = 1 + max([*(peer.number for peer in known.peers), *known.ended, *reports])
        self._coordinator = self._make_coordinator(str(home), next_term(known.term, home), machines.store() or "")
        addresses = {number: join.listens for number, (_, join) in joins.items()}
        stores = {machine.number: machines.served_by(machine) for machine in machines.here.values()}
        given = self._coordinator.resume(list(reports.values()), now_s, addresses, stores)
        return [*self._record_failures(failures), *self._carry(given)]

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Handles a report from a node."""
        if isinstance(report, JoinJob):
            return self._joined(node, report, now_s)
        if isinstance(report, Follow):
            return self._returned(node, report, now_s)
        if self._end is not None or node not in self._machines.here:
            return []
        name = self._machines.name(node)
        match report:
            case WorkerStarted(uid):
                return self._carry(self._coordinator.worker_started(uid, name, now_s))
            case StateReplicated(generation):
                return self._carry(self._coordinator.machine_replicated(name, generation, now_s))
            case WorkerStalled(uid, why):
                return self._carry(self._coordinator.worker_stalled(uid, why, now_s))
            case WorkerExited(uid, how, exit_code):
                return self._carry(self._coordinator.worker_ended(uid, how, exit_code, now_s))
            case WorkerMessage(uid, message):
                self._has_spoken = True
                return self._carry(self._coordinator.handle_worker_message(uid, message, now_s))
            case Slots():
                return self._slots_changed(node, report, now_s)
            case ExitNotice():
                return self._carry(self._coordinator.machine_leaves(name, now_s))
            case NodeStopped(reason):
                return self._left(node, reason, now_s)
        return []

    def running(self) -> JobRunning | None:
        """Returns the notice for launchers outside this job, or None after the job has ended."""
        if self._end is not None:
            return None
        is_sure = self._is_gathered and self._coordinator.resigns_s is None
        return JobRunning(self.identity, self._machines.listens(self._machines.home) if is_sure else "")

    def is_here(self, number: int) -> bool:
        """Returns True if a machine is connected."""
        return any(machine.number == number for machine in self._machines.here.values())

    def handle_running_job(self, other: JobRunning, now_s: float) -> Orders:
        """Handles the notice of a running job: moves to that job, or waits until that job has a coordinator."""
        if self._end is not None:
            return []
        if other.address:
            self._end = JobMoved(other.job, other.address)
            return [(node, self._end) for node in self._machines.here]
        self._quiet_until_s = now_s + _QUIET_SINCE_A_CALL_S
        is_held_back = self._coordinator.hold_back(self._quiet_until_s)
        if self._has_found_another_job or not is_held_back:
            return []
        self._has_found_another_job = True
        text = "a job with this address is already running, and is looking for a coordinator; waiting for it"
        return [(node, NotifyOrder(text)) for node in self._machines.here]

    def handle_foreign_job(self, host: str) -> bool:
        """Records that a host has reported a running job with another secret; returns True if `tick` will print this.

        Anyone can send such a report, because it is not authenticated. It therefore neither ends nor delays this job.
        """
        if host in self._foreign_hosts or len(self._foreign_hosts) == _MAX_FOREIGN_HOSTS:
            return False
        self._foreign_hosts.append(host)
        return True

    def _print_foreign_hosts(self) -> Orders:
        if not self._machines.here:  # no launcher has connected that could print the warning
            return []
        new, self._printed_hosts = self._foreign_hosts[self._printed_hosts :], len(self._foreign_hosts)
        warnings = [NotifyOrder(f"warning: {_foreign_job_warning([host])}") for host in new]
        return [(node, warning) for warning in warnings for node in self._machines.here]

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has exited. The kernel has killed the node's workers."""
        machine = self._machines.here.pop(node, None)
        if machine is None or machine.first_slot is None or self._end is not None:
            return []
        return self._carry(self._coordinator.machine_left(str(machine.number), why, now_s))

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Handles the loss of a node's connection."""
        if self._end is not None or (machine := self._machines.here.pop(node, None)) is None:
            return []
        if machine.first_slot is None:
            return []
        self._machines.away.append(machine)
        return self._carry(self._coordinator.machine_lost(str(machine.number), why, now_s, silent_s))

    def tick(self, now_s: float) -> Orders:
        """Performs the work that is due at `now_s`."""
        if self._end is not None:
            return []
        warnings, given = self._print_foreign_hosts(), list[CoordinatorOrder]()
        if self._is_gathered:
            given = self._coordinator.tick(now_s)
        elif now_s >= self.started_s + self.policy.join_timeout_s:
            joins = [machine.join for machine in self._machines.here.values()]
            given = [EndOrder(1, gathering_timeout(joins, self.policy))]
        if self._foreign_hosts and self._coordinator.hold_back(0.0):  # there is no view yet
            given = [_explained(order, self._foreign_hosts) for order in given]
        return [*warnings, *self._carry(given)]

    def _joined(self, node: str, join: JoinJob, now_s: float) -> Orders:
        if wrong := incompatibility(join, is_elastic=True):
            return [(node, JobEnded(2, wrong))]
        if join.number >= 0:
            self._returning[node] = join
            return []
        if isinstance(self._end, JobMoved):
            return [(node, self._end)]
        if self._end is not None:
            return [(node, JobEnded(self._end.code if join.job == self.identity else 1, "the job has ended"))]
        self._machines.add(node, join)
        if self._is_gathered:
            return self._take_in(node, now_s)
        machines = self._machines
        if len(machines.here) < self.policy.min_nodes or machines.store() is None:
            return [(node, gathering_notice(len(machines.here), self.policy))]
        self._is_gathered = True
        machines.home = next(machine.number for machine in machines.here.values() if machine.join.serves)
        if not machines.is_lone:
            self._coordinator = self._make_coordinator(str(machines.home), store=machines.store() or "")
            self._coordinator.hold_back(self._quiet_until_s)
        return [order for name in list(machines.here) for order in self._take_in(name, now_s)]

    def _take_in(self, node: str, now_s: float) -> Orders:
        machine, name, coordinator = self._machines.here[node], self._machines.name(node), self._coordinator
        host, where, store = machine.join.host, machine.join.listens, self._machines.served_by(machine)
        given = coordinator.machine_joined(name, host, machine.slots, now_s, where, store)
        return [*self._remember(node), *self._carry([*given, *coordinator.machine_listed(name, now_s)])]

    def _returned(self, node: str, follow: Follow, now_s: float) -> Orders:
        """Adds a machine that was unreachable or followed another launcher."""
        join, report = self._returning.pop(node, None), follow.report
        if join is None:
            return []
        if report.job_state.job not in ("", self.identity):
            waits = self.handle_running_job(JobRunning(report.job_state.job), now_s)
            return [*waits, (node, FollowResponse(False, -1, is_stranger=True)), (node, NodeDropped())]
        if self._end is not None:
            return [(node, self._end)]
        machines = self._machines
        store = machines.served_by(machines.returns(node, join, report))
        notices = [*self._record_failures(follow.failures), *self._remember(node)]
        given = self._coordinator.machine_returned(report, now_s, join.listens, store)
        return [(node, FollowResponse(True, machines.home)), *notices, *self._carry(given)]

    def _slots_changed(self, node: str, report: Slots, now_s: float) -> Orders:
        machines = self._machines
        machines.here[node].slots = report.count
        notices = self._record_failures(report.failures)
        is_over = not any(machine.slots for machine in machines.here.values())
        if is_over and not self._blame.failures and not self._has_spoken:
            return self._over(JobEnded(0))  # the script completed without an elastic loop
        return [*notices, *self._carry(self._coordinator.slots_changed(machines.name(node), report.count, now_s))]

    def _record_failures(self, failures: Iterable[WorkerFailure]) -> Orders:
        """Records failures, and orders every machine to store them in case this launcher is lost."""
        is_new = self._blame.add(failures)
        return [order for node in self._machines.here for order in self._remember(node)] if is_new else []

    def _remember(self, node: str) -> Orders:
        is_kept = self._blame.failures and not self._machines.is_lone
        return [(node, RecordFailures(self._blame.failures))] if is_kept else []

    def _left(self, node: str, reason: str, now_s: float) -> Orders:
        machine = self._machines.here[node]
        if machine.number == self._machines.home or (machine.join.serves and not self._is_gathered):
            return self._over(JobEnded(1, f"{machine.join.host} was stopped ({reason})"))
        del self._machines.here[node]
        left = self._coordinator.machine_left(str(machine.number), reason, now_s, has_announced_end=True)
        return [(node, JobEnded(0 if reason == ORDERLY_SIGNAL.name else 1)), *self._carry(left)]

    def _carry(self, given: CoordinatorOrders) -> Orders:
        """Converts the coordinator's orders for machines into orders for nodes."""
        carried: Orders = []
        nodes = self._machines.nodes()
        for order in given:
            match order:
                case EndOrder(code, reason):
                    carried += self._over(JobEnded(code, reason))
                case NotifyOrder():
                    carried += [(node, order) for node in self._machines.here]
                case _ if order.machine not in nodes:
                    pass
                case StartOrder(machine):
                    carried.append((nodes[machine], self._machines.begin(nodes[machine], self.policy.run_id)))
                case HandoverOrder(machine, to):
                    carried.append((nodes[machine], self._hand_over(int(machine), to)))
                case SendOrder() | ReplicateOrder() | FenceStalledOrder() | CloseSlotsOrder():
                    carried.append((nodes[order.machine], order))
        return carried

    def _hand_over(self, number: int, to: int) -> Order:
        """Returns the order to follow the successor or, for this launcher itself, to exit."""
        if self.successor is None or self.successor[0] != to:
            self.successor = to, self._machines.listens(to)
        is_home = number == self._machines.home
        return JobEnded(0, f"machine {to} coordinates from now on") if is_home else FollowLauncher(*self.successor)

    def _over(self, end: JobEnded) -> Orders:
        if self._end is not None:
            return []
        self._end = JobEnded(end.code, end.reason, shortened(self._blame.failures) if end.code else ())
        return [(node, self._end) for node in self._machines.here]


def _foreign_job_warning(hosts: Sequence[str]) -> str:
    return (
        f"{', '.join(hosts)} reported that a job with another secret is running at this rendezvous address. Check "
        "whether there is such a job: set its PACELINE_SECRET to join it, or choose another address. The report is "
        "not authenticated, so a stranger may have sent it"
    )


def _explained(order: CoordinatorOrder, hosts: Sequence[str]) -> CoordinatorOrder:
    """Adds the likely reason to the order that ends a job because too few machines or workers have joined it."""
    if not isinstance(order, EndOrder) or order.code == 0:
        return order
    return EndOrder(order.code, f"{order.reason}. The likely reason: {_foreign_job_warning(hosts)}")
