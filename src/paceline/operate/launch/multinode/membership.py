"""`Membership`: the state machine that decides which nodes run which generation of workers, and with which ranks.

The state machine uses no sockets, processes or clock. Events arrive as method calls with a timestamp, and each method
call returns orders for nodes.

If a generation ends because nodes joined or left, the next generation does not count as a restart. If a worker failed,
the next generation counts as a restart, unless a lost node explains the failure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import msgspec

from paceline import __version__
from paceline.operate.launch.failures import WorkerFailure, first_failure, shortened
from paceline.operate.launch.multinode.protocol import (
    JobEnded,
    JoinJob,
    NodeStopped,
    Order,
    Report,
    Start,
    Stop,
    WorkerFailed,
    WorkersFinished,
    WorkersStopped,
)
from paceline.train.elastic.protocol import NotifyOrder


def assign_ranks(
    joins: Sequence[JoinJob], generation: int, restart_count: int, max_restarts: int, run_id: str, port: int | None
) -> list[Start]:
    """Returns a Start for each node. Ranks are assigned contiguously, in the order of `joins`.

    `port` is the port that the user chose for torch's store, or None to use the port chosen by the first node.
    """
    sizes = [join.workers for join in joins]
    starts = []
    for index, join in enumerate(joins):
        role_sizes = [other.workers if other.role == join.role else 0 for other in joins]
        start = Start(
            generation=generation,
            restart_count=restart_count,
            max_restarts=max_restarts,
            run_id=run_id,
            group_rank=index,
            group_world_size=len(joins),
            first_rank=sum(sizes[:index]),
            world_size=sum(sizes),
            role_first_rank=sum(role_sizes[:index]),
            role_world_size=sum(role_sizes),
            master_addr=joins[0].address,
            master_port=port or joins[0].port,
            hosts=tuple(other.host for other in joins),
            store_port=joins[0].store_port,
        )
        starts.append(start)
    return starts


Orders = list[tuple[str, Order]]  # pairs of a node and an order for it


class JobController(Protocol):
    """The state machine of the rendezvous: `Membership` for ordinary jobs, `ElasticController` for elastic jobs."""

    @property
    def deadline_s(self) -> float | None:
        """The time at which `tick` must be called, or None."""

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Handles a node's report."""

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher and workers have exited."""

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node that disconnected or was silent for `silent_s` seconds. Its workers may still be running."""

    def tick(self, now_s: float) -> Orders:
        """Carries out the work that is due at `now_s`."""


FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
STEADY_S = 300.0  # a generation that runs for this long resets the pauses


class MembershipPhase(Enum):
    """The phase of the job."""

    GATHERING = auto()  # the job is waiting for enough nodes; no workers run
    RUNNING = auto()  # the workers of `Membership.members` run, as one generation
    STOPPING = auto()  # the workers are being stopped because one failed, or a node joined or left
    PAUSING = auto()  # a worker failed, and all workers will be restarted after a pause
    OVER = auto()  # every node has been ordered to exit


@dataclass(frozen=True)
class MembershipPolicy:
    """The settings of the job, taken from the node that hosts the rendezvous. All times are in seconds."""

    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    is_static: bool = False  # whether nodes have fixed numbers, and the job ends as soon as any node exits
    max_restarts: int = 0  # the maximum number of restarts after failures
    last_call_s: float = 0.5  # the time to wait for more nodes after each arrival, once `min_nodes` have joined
    join_timeout_s: float = 600.0  # the time to wait for `min_nodes` nodes
    port: int | None = None  # the port that the user chose for torch's store
    return_timeout_s: float = 120.0  # the time to wait for lost machines that an elastic job needs to continue
    rendezvous_host_first: bool = (
        False  # whether the rendezvous's host, which all nodes can reach, gets the first ranks
    )


def pause_s(restarts: int) -> float:
    """Returns the pause before the n-th consecutive restart: 0.25 s, 0.5 s, 1 s, up to 30 s."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(restarts - 1, 30))


@dataclass
class Membership:
    """The nodes of a job. The caller must call `tick` at `deadline_s`, which other events can change."""

    policy: MembershipPolicy
    started_s: float = 0.0
    phase: MembershipPhase = MembershipPhase.GATHERING
    generation: int = 0
    restarts: int = 0
    nodes: dict[str, JoinJob] = field(default_factory=dict)  # nodes in rank order, or in order of arrival
    members: list[str] = field(default_factory=list)
    deadline_s: float | None = None
    _open: set[str] = field(default_factory=set)  # members whose workers are running
    _finished: set[str] = field(default_factory=set)
    _failures: list[WorkerFailure] = field(default_factory=list)
    _makes_room: bool = False  # whether the generation ended to admit a new node
    _lost: list[str] = field(default_factory=list)  # one sentence per node lost in this generation
    _last_arrival_s: float = 0.0
    _in_a_row: int = 0

    def __post_init__(self) -> None:
        self.deadline_s = self.started_s + self.policy.join_timeout_s

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Handles a report from a node."""
        match report:
            case JoinJob():
                return self.joined(node, report, now_s)
            case WorkerFailed():
                return self.failed(node, report, now_s)
            case WorkersFinished():
                return self.finished(node, report, now_s)
            case WorkersStopped():
                return self.stopped(node, report, now_s)
            case NodeStopped():
                return self.left(node, report, now_s)
        return []

    def joined(self, node: str, join: JoinJob, now_s: float) -> Orders:
        """Adds a node that has requested to join."""
        if self.phase is MembershipPhase.OVER:
            return [(node, JobEnded(1, "the job has ended"))]
        if wrong := incompatibility(join, is_elastic=False):
            return [(node, JobEnded(2, wrong))]
        if self.policy.is_static and (wrong := self._wrong_number(join)):
            return [(node, JobEnded(2, wrong))]
        self.nodes[node] = join
        self._last_arrival_s = now_s
        if self.phase is MembershipPhase.GATHERING:
            orders = self._gather(now_s)
            if len(self.nodes) < self.policy.min_nodes:
                orders.append((node, gathering_notice(len(self.nodes), self.policy)))
            return orders
        if (
            self.phase is MembershipPhase.RUNNING
            and len(self.members) < self.policy.max_nodes
            and self._open == {*self.members}
        ):
            self._makes_room = True
            return self._stop(f"{join.host} joins")
        return [(node, NotifyOrder(f"{len(self.members)} machines are in use; this one waits until one leaves"))]

    def failed(self, node: str, report: WorkerFailed, now_s: float) -> Orders:
        """Records the first failure among a node's workers; a call to `stopped` follows."""
        is_open = self.phase in (MembershipPhase.RUNNING, MembershipPhase.STOPPING)
        if report.generation != self.generation or not is_open:
            return []
        failure = report.failure
        self._failures.append(failure)
        if self.phase is MembershipPhase.STOPPING:
            return []
        return self._stop(f"rank {failure.rank} failed on {failure.host}", but=node)

    def finished(self, node: str, report: WorkersFinished, now_s: float) -> Orders:
        """Records that a node's workers have exited without a failure."""
        if report.generation == self.generation:
            self._finished.add(node)
        return self._closed(node, report.generation, now_s)

    def stopped(self, node: str, report: WorkersStopped, now_s: float) -> Orders:
        """Records that all of a node's workers have exited."""
        if node in self.nodes:
            self.nodes[node] = msgspec.structs.replace(self.nodes[node], port=report.port, store_port=report.store_port)
        if report.generation == self.generation:
            known = {(failure.rank, failure.pid) for failure in self._failures}
            self._failures += [failure for failure in report.failures if (failure.rank, failure.pid) not in known]
        return self._closed(node, report.generation, now_s)

    def left(self, node: str, leave: NodeStopped, now_s: float) -> Orders:
        """Removes a node that was stopped by its user or scheduler."""
        join = self.nodes.get(node)
        if join is None:
            return []
        if join.serves or self.policy.is_static:
            return self._end(JobEnded(1, f"{join.host} was stopped ({leave.reason})"))
        return [(node, JobEnded(1)), *self._gone(node, f"{join.host} left ({leave.reason})", now_s)]

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has exited."""
        return self.lost(node, why, now_s)

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node whose connection failed or timed out."""
        join = self.nodes.get(node)
        if join is None:
            return []
        return self._gone(node, f"{join.host} ({join.address}, pid {join.pid}) was lost: {why}", now_s)

    def tick(self, now_s: float) -> Orders:
        """Carries out the work that is due at `now_s`."""
        if self.deadline_s is None or now_s < self.deadline_s or self.phase is MembershipPhase.OVER:
            return []
        if self.phase is MembershipPhase.PAUSING:
            return self._begin_gathering(now_s)
        return self._gather(now_s) if self.phase is MembershipPhase.GATHERING else []

    def _wrong_number(self, join: JoinJob) -> str | None:
        holder = next((node for node in self.nodes.values() if node.node_rank == join.node_rank), None)
        if join.node_rank is None or join.node_rank >= self.policy.max_nodes:
            return f"--node-rank {join.node_rank} is not from 0 to {self.policy.max_nodes - 1}"
        if holder is not None:
            return (
                f"--node-rank {join.node_rank} is already used by {holder.host} (pid {holder.pid}); give each machine "
                "its own"
            )
        return None

    def _gather(self, now_s: float) -> Orders:
        policy, there = self.policy, len(self.nodes)
        is_enough = there >= policy.min_nodes
        until_s = self._last_arrival_s + policy.last_call_s if is_enough else self.started_s + policy.join_timeout_s
        if there < policy.max_nodes and now_s < until_s:
            self.deadline_s = until_s
            return []
        if is_enough:
            return self._start(now_s)
        return self._end(JobEnded(1, gathering_timeout(self.nodes.values(), policy)))

    def _start(self, now_s: float) -> Orders:
        if self.policy.is_static:
            self.nodes = dict(sorted(self.nodes.items(), key=lambda item: item[1].node_rank or 0))
        elif self.policy.rendezvous_host_first:
            self.nodes = dict(sorted(self.nodes.items(), key=lambda item: not item[1].serves))
        self.generation += 1
        self.phase = MembershipPhase.RUNNING
        self.started_s, self.deadline_s = now_s, None
        self.members = list(self.nodes)[: self.policy.max_nodes]
        self._open = set(self.members)
        self._finished, self._failures, self._lost, self._makes_room = set(), [], [], False
        policy, joins = self.policy, [self.nodes[node] for node in self.members]
        starts = assign_ranks(joins, self.generation, self.restarts, policy.max_restarts, policy.run_id, policy.port)
        waiting = list(self.nodes)[self.policy.max_nodes :]
        orders: Orders = [*zip(self.members, starts, strict=True)]
        return orders + [(node, NotifyOrder(f"{len(self.members)} machines are in use")) for node in waiting]

    def _stop(self, reason: str, but: str | None = None) -> Orders:
        self.phase = MembershipPhase.STOPPING
        stop = Stop(self.generation, reason, is_failure=but is not None)
        return [(node, stop) for node in self.members if node in self._open and node != but]

    def _closed(self, node: str, generation: int, now_s: float) -> Orders:
        if generation != self.generation or node not in self._open:
            return []
        self._open.discard(node)
        return [] if self._open else self._generation_over(now_s)

    def _gone(self, node: str, why: str, now_s: float) -> Orders:
        join = self.nodes.pop(node)
        if self.phase is MembershipPhase.OVER:
            return []
        if join.serves or (self.policy.is_static and self.phase is not MembershipPhase.GATHERING):
            return self._end(JobEnded(1, why, self._causes()))
        if node not in self._open:
            return self._gather(now_s) if self.phase is MembershipPhase.GATHERING else []
        self._lost.append(why)
        self._open.discard(node)
        orders = self._stop(why) if self.phase is MembershipPhase.RUNNING else []
        return orders if self._open else orders + self._generation_over(now_s)

    def _generation_over(self, now_s: float) -> Orders:
        """Returns the orders to send after the last worker in a generation has exited."""
        explained = self._makes_room or (bool(self._lost) and all(failure.is_consequence for failure in self._failures))
        if self._finished == {*self.members}:
            return self._end(JobEnded(0))
        if not self._failures or explained:
            return self._begin_gathering(now_s)
        if self.restarts >= self.policy.max_restarts:
            return self._end(JobEnded(1, "; ".join(self._lost), shortened(self._failures)))
        self._in_a_row = 1 if now_s - self.started_s > STEADY_S else self._in_a_row + 1
        self.restarts += 1
        self.phase = MembershipPhase.PAUSING
        self.deadline_s = now_s + pause_s(self._in_a_row)
        cause = first_failure(self._failures)
        which = f"restart {self.restarts} of {self.policy.max_restarts} in {pause_s(self._in_a_row):g} s"
        reason = f"{which}: rank {cause.rank} failed ({cause.host}, pid {cause.pid}, {cause.how})"
        return [(node, NotifyOrder(reason)) for node in self.nodes]

    def _causes(self) -> tuple[WorkerFailure, ...]:
        """Returns the failures in this generation, or an empty tuple if a lost node explains all of them."""
        is_over = self.phase is MembershipPhase.GATHERING or all(failure.is_consequence for failure in self._failures)
        return () if is_over else shortened(self._failures)

    def _begin_gathering(self, now_s: float) -> Orders:
        self.phase = MembershipPhase.GATHERING
        self.started_s = now_s
        self.members = []
        orders = self._gather(now_s)
        if self.phase is MembershipPhase.GATHERING and len(self.nodes) < self.policy.min_nodes:
            missing = self.policy.min_nodes - len(self.nodes)
            reason = "; ".join([*self._lost, f"waiting for {missing} more"])
            orders += [(node, NotifyOrder(reason)) for node in self.nodes]
        return orders

    def _end(self, end: JobEnded) -> Orders:
        self.phase = MembershipPhase.OVER
        self.deadline_s = None
        return [(node, end) for node in self.nodes]


def gathering_notice(count: int, policy: MembershipPolicy) -> NotifyOrder:
    """Returns the notice that machines are missing, given the number of those that have joined."""
    return NotifyOrder(f"{count} of {policy.min_nodes} machines have joined; waiting for the others")


def gathering_timeout(joins: Collection[JoinJob], policy: MembershipPolicy) -> str:
    """Returns the reason why a job ends if only the machines in `joins` have arrived in time."""
    hosts = ", ".join(join.host for join in joins) or "none"
    return (
        f"waited {policy.join_timeout_s:.0f} s for {policy.min_nodes} machines; {len(joins)} arrived ({hosts}). Look "
        "at the output of the others; --rdzv-conf join_timeout=SECONDS sets a longer wait"
    )


def incompatibility(join: JoinJob, is_elastic: bool) -> str | None:
    """Returns the reason why a node cannot join the job, or None."""
    if join.version != __version__:
        return (
            f"{join.host} (pid {join.pid}) runs Paceline {join.version or 'older than 0.1.0'}, but the launcher that "
            f"hosts the rendezvous runs {__version__}; install the same version on all machines"
        )
    if join.is_elastic != is_elastic:
        without, with_ = ("without", "with") if is_elastic else ("with", "without")
        return (
            f"{join.host} (pid {join.pid}) was started {without} --elastic, but the launcher that hosts the rendezvous "
            f"{with_}; start all machines in the same way"
        )
    return None
