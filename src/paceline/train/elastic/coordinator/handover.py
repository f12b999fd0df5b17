"""The planned handover of the coordinator's role when its launcher is about to exit.

1. A planned view removes the workers on the coordinator's own machine. The members of this view and of all later ones
   use the store of the successor's launcher for their rendezvous. If no worker has to leave, a planned view with the
   same members only changes the store.
2. When all members have entered that view, the job state is replicated to every machine, and the successor is ordered
   to stand as a candidate. From then on, this coordinator no longer makes decisions.
3. The successor disconnects from this launcher and becomes a candidate, as after the loss of a coordinator
   (`election.py`). Then the other machines are ordered to follow it.

The successor is the machine that would be elected anyway: the one with the lowest number. It needs the same quorum as
any candidate, so correctness does not depend on the handover. If the successor fails during the handover, the other
launchers search for a coordinator as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.train.elastic.coordinator.elastic_job import ElasticJob
from paceline.train.elastic.coordinator.worker_registry import MachineRecord, WorkerRecord
from paceline.train.elastic.protocol import (
    CoordinatorOrders,
    HandoverOrder,
    LauncherAddress,
    ReplicatedJobState,
    ReplicateOrder,
    machine_of,
)

_STANDS_S = 1.0  # time after which the others must follow the successor even if it is not a candidate yet
_UNFIT_S = 10.0  # time for which a machine is excluded as successor after members failed to reach its store
_SETTLES_S = 5.0  # time for members to enter the latest view after the last worker on this machine has exited


def replication_orders(job: ElasticJob, home: int) -> CoordinatorOrders:
    """Returns the orders that replicate the job's state to every machine whose copy is outdated.

    Before the first view, there is no state to replicate.
    """
    if not job.views.since_complete or job.over is not None:
        return []
    job_state = _replicated_state(job, home)
    orders: CoordinatorOrders = []
    for machine in job.registry.machines.values():
        if machine.is_reachable and machine.replicated != job_state:
            machine.replicated = job_state
            orders.append(ReplicateOrder(machine.name, job_state))
    return orders


def _replicated_state(job: ElasticJob, home: int) -> ReplicatedJobState:
    views, workers = job.views, job.registry.workers
    members = {uid for view in views.since_complete for uid in view.members}
    machines = sorted(job.registry.machines.values(), key=lambda machine: int(machine.name))
    return ReplicatedJobState(
        term=views.term,
        coordinator=home,
        fingerprint=job.fingerprint or "",
        complete=views.completed,
        views=tuple(views.since_complete),
        dead=tuple(sorted(uid for uid in members if not workers[uid].lives)),
        ended=tuple(int(machine.name) for machine in machines if machine.has_left and machine.has_announced_end),
        peers=tuple(
            LauncherAddress(int(machine.name), machine.host, machine.address)
            for machine in machines
            if not machine.has_left
        ),
        transfers=tuple(job.open_transfers()),
        job=job.identity,
    )


def resume(job: ElasticJob, known: ReplicatedJobState, now_s: float) -> None:
    """Restores the job from replicated state. All machines are considered unreachable until they reconnect."""
    job.fingerprint, job.identity = known.fingerprint or None, known.job
    lost_s = now_s - job.policy.return_patience_s + job.policy.follow_patience_s

    def machine_at(number: int, host: str = "", address: str = "") -> MachineRecord:
        name = str(number)
        absent = MachineRecord(name, host or f"machine {name}", 0, is_reachable=False, has_begun=True)
        absent.lost_s, absent.address = lost_s, address
        return job.registry.machines.setdefault(name, absent)

    for peer in known.peers:
        machine_at(peer.number, peer.host, peer.address)
    for uid in known.members:
        worker = job.registry.workers[uid] = WorkerRecord(uid, machine_at(machine_of(uid)))
        if known.is_dead(uid):
            worker.ended = "with its launcher" if machine_of(uid) in known.ended else "before"
    for number in known.ended:
        found = machine_at(number)
        found.replaces, found.has_left, found.has_announced_end = False, True, True
    job.views.resume(known.views, known.complete)
    job.transfers = {
        transfer.receiver: transfer for transfer in known.transfers if not known.is_dead(transfer.receiver)
    }


def succession(known: ReplicatedJobState, home: int) -> str:
    """Returns a sentence that names the new coordinator and gives the state of the previous coordinator."""
    if known.coordinator == home:
        return f"machine {home} coordinates again"
    state = "has left" if known.coordinator in known.ended else "cannot be reached"
    return f"machine {known.coordinator}, the previous coordinator, {state}; machine {home} coordinates from now on"


@dataclass
class CoordinatorHandover:
    """The handover by a coordinator whose launcher is about to exit."""

    home: MachineRecord  # the coordinator's machine
    store: str  # the store that the members use for their rendezvous before the handover
    successor: MachineRecord | None = None  # the next coordinator's machine
    # For each machine whose store some members could not reach, the time until which it is not considered.
    unfit_s: dict[MachineRecord, float] = field(default_factory=dict)
    empty_s: float | None = None  # the time at which the last worker on the coordinator's machine exited
    ordered_s: float | None = None  # the time at which the successor was ordered to stand
    is_over: bool = False  # whether the other machines have been ordered to follow the successor

    @property
    def has_resigned(self) -> bool:
        """Whether the coordinator has stopped making decisions."""
        return self.ordered_s is not None


def choose_successor(job: ElasticJob, retirement: CoordinatorHandover, now_s: float) -> None:
    """Chooses the successor, whose store the members of future views use for their rendezvous.

    A network partition may separate some members from this store even if all of them can reach this coordinator. In
    that case another machine is chosen.
    """
    views, before, unfit_s = job.views, retirement.successor, retirement.unfit_s
    if before is not None and job.breaks.waiting and views.is_on_its_way_to(before.store):
        unfit_s[before] = now_s + _UNFIT_S
    running = [machine for machine in job.registry.machines.values() if machine.is_reachable and machine.has_begun]
    able = [
        machine for machine in running if machine is not retirement.home and machine.store and not machine.is_leaving
    ]
    fit = [machine for machine in able if now_s >= unfit_s.get(machine, now_s)]
    if able and not fit:
        job.due_s.append(min(unfit_s[machine] for machine in able))
    retirement.successor = min(fit, key=lambda machine: (not machine.slots, int(machine.name)), default=None)
    job.views.store = retirement.store if retirement.successor is None else retirement.successor.store
    job.must_move = retirement.successor is not None and not _has_workers(job, retirement.home)


def may_hand_over(job: ElasticJob, retirement: CoordinatorHandover, now_s: float) -> bool:
    """Returns True if the successor can be ordered to stand now."""
    stays = any(worker.trains and worker.leaving is None for worker in job.views.team)
    is_needed = job.over is None and job.ending_s is None and stays
    if not is_needed or retirement.successor is None or _has_workers(job, retirement.home):
        retirement.empty_s = None
        return False
    if _has_settled(job):
        return True
    if retirement.empty_s is None:
        retirement.empty_s = now_s
    until_s = retirement.empty_s + _SETTLES_S
    if now_s < until_s:
        job.due_s.append(until_s)
        return False
    return not job.lacks_quorum


def notify_successor(job: ElasticJob, retirement: CoordinatorHandover, now_s: float) -> None:
    """Orders the successor to become a candidate. From then on, this machine is treated as having left the job."""
    successor, home = retirement.successor, retirement.home
    assert successor is not None
    home.has_left = home.has_announced_end = True
    retirement.ordered_s = now_s
    job.orders.append(HandoverOrder(successor.name, int(successor.name)))


def notify_others(job: ElasticJob, retirement: CoordinatorHandover, now_s: float) -> CoordinatorOrders | None:
    """Returns the orders that complete the handover, or None until the successor is a candidate or is late."""
    successor = retirement.successor
    assert successor is not None
    stands = not successor.is_reachable or successor.has_left  # a successor disconnects before its candidacy
    if retirement.is_over or not (stands or now_s >= deadline_s(retirement)):
        return None
    retirement.is_over = True
    others = [machine for machine in job.registry.machines.values() if machine is not retirement.home]
    followers = [*(machine for machine in others if machine.is_reachable), retirement.home]
    return [HandoverOrder(machine.name, int(successor.name)) for machine in followers]


def deadline_s(retirement: CoordinatorHandover) -> float:
    """Returns the time at which the machines must follow the successor even if it is not a candidate yet."""
    assert retirement.ordered_s is not None
    return retirement.ordered_s + _STANDS_S


def _has_workers(job: ElasticJob, machine: MachineRecord) -> bool:
    return any(worker.lives and worker.machine is machine for worker in job.registry.workers.values())


def _has_settled(job: ElasticJob) -> bool:
    """Returns True if all members have entered the latest view and use the successor's store."""
    views = job.views
    is_settled = views.is_complete and job.withheld is None and not job.breaks.waiting
    return is_settled and views.latest is not None and views.latest.store == views.store
