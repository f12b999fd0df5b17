"""The coordinator of an elastic job: a state machine that receives events and returns orders.

The coordinator has no socket, process or clock. Events arrive as method calls with a timestamp. They change the job's
state (`elastic_job.py`, `worker_registry.py`, `views.py`), and `_settle` derives the orders from this state alone.
Reports from different workers may therefore arrive in any order. `membership_rules.py` implements the following rules,
listed in the order in which they are applied:

1. Once a member has finished, all rounds are committed and every member has the final state. No more workers join, no
   quorum is needed, and the job ends when all members have finished and exited.
2. The first view is issued when all workers are ready, or some time after enough workers are ready.
3. A forced view is issued when a member is absent (it has exited, is stalled, or is on an unreachable machine), or when
   connections have broken and no death has explained this within `break_patience_s`. The forced view contains the
   remaining members of the base and the newcomers that have the state, and it requires a quorum.

   If no worker with the state is left, the coordinator waits for members that may return. It also gives newcomers time
   to report that they have the state; newcomers report this when their connections break. If no worker with the state
   is found and no round can have been committed, the job restarts from the beginning. If a round may have been
   committed, the state is lost and the job ends.

   A stopped member is killed once the other members continue without it, so that it cannot resume training with them.
   The last worker with the state is never killed, regardless of how long it is stopped.
4. When all members have entered the latest view, a planned view adds the ready workers and removes the workers that are
   leaving. Workers that can catch up while the others train do so first.
5. When the coordinator's own launcher is about to exit, another launcher takes over (`handover.py`).

Workers follow these rules:

- A worker enters a forced view immediately, even while it forms the group of another view.
- A worker enters a planned view at the beginning of an agreed batch, or while it waits between batches in a view that
  must wait. A worker whose connections broke does *not* enter a planned view, because the other members may be in the
  middle of a batch, where newcomers cannot begin.
- A worker that waits between two batches does not report broken connections, because others may already have entered
  the planned view.
- No member continues in a view before all members of the view have the state.
- In a view that must wait, all members finish a batch that any of them has begun, and do not begin another.
- A worker that receives a view of which it is not a member has lost its state, and exits or requests to join again. If
  it was asked to exit, it exits with code 0, at the agreed batch if the view is planned and the worker's connections
  work, and immediately otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.train.elastic.coordinator import handover
from paceline.train.elastic.coordinator import membership_rules as rules
from paceline.train.elastic.coordinator.elastic_job import ConnectionFailure, CoordinatorPolicy, ElasticJob
from paceline.train.elastic.coordinator.election import merge_reports
from paceline.train.elastic.coordinator.handover import CoordinatorHandover
from paceline.train.elastic.coordinator.views import Views
from paceline.train.elastic.coordinator.worker_registry import MachineRecord, WorkerPhase, WorkerRecord, WorkerRegistry
from paceline.train.elastic.protocol import (
    CaughtUp,
    CoordinatorOrders,
    ExitRequest,
    FromWorker,
    LeaveNotice,
    LoopFinished,
    MachineReport,
    NotifyOrder,
    SendOrder,
    TransferReady,
    ViewFailed,
    ViewInstalled,
    WorkerReady,
)

RESIGN_S = 2.0  # a coordinator that has had no quorum for this long resigns


class Coordinator:
    """The coordinator of an elastic job. The caller must call `tick` at `deadline_s` if no other event occurs earlier.

    Every method returns the orders to carry out, in order. The names of machines and workers are never reused:
    replacement workers and restarted launchers get new names.
    """

    def __init__(
        self,
        policy: CoordinatorPolicy,
        now_s: float,
        term: int = 1,
        *,
        home: str | None = None,
        store: str = "",
        identity: str = "",
    ) -> None:
        """Initializes the coordinator of a new job.

        Args:
            policy: The coordinator's settings.
            now_s: The current time.
            term: A number larger than the term of any earlier coordinator of this job.
            home: The name of the coordinator's own machine, or None if no other machine can take over. If given, the
                name of each machine is its number.
            store: The store for the members' rendezvous, or "" for the store in their environment.
            identity: An identifier that distinguishes this job from all others.
        """
        self._registry = WorkerRegistry()
        self._home = home
        self._job = ElasticJob(
            policy,
            now_s,
            self._registry,
            Views(self._registry, term, store=store),
            is_shared=home is not None,
            identity=identity,
            quiet_until_s=now_s + policy.quiet_s,
        )
        self._is_resuming = False
        self.retirement: CoordinatorHandover | None = None  # set when this coordinator's launcher is about to exit
        self._lacks_quorum_s: float | None = None  # the time at which the quorum was lost
        self._is_superseded = False
        self.resigns_s: float | None = None  # the time at which the launcher must search for another coordinator
        self.deadline_s: float | None = now_s + policy.join_timeout_s

    def resume(
        self,
        reports: Collection[MachineReport],
        now_s: float,
        addresses: Mapping[int, str] = {},
        stores: Mapping[int, str] = {},
    ) -> CoordinatorOrders:
        """Takes over a job from another coordinator, given the reports of the machines that follow this coordinator.

        The other coordinator's last messages are repeated to workers that may have missed them. Workers that the other
        coordinator excluded from a view stay excluded. `addresses` holds the launchers' addresses that have changed,
        and `stores` the store for the members' rendezvous while a machine's launcher is the coordinator.
        """
        known = merge_reports(reports)
        handover.resume(self._job, known, now_s)
        self._job.notify(handover.succession(known, int(self._home or 0)))
        self._is_resuming = True
        for report in reports:
            self.machine_returned(report, now_s, addresses.get(report.number, ""), stores.get(report.number, ""))
        self._is_resuming = False
        return self._settle(now_s)

    def machine_returned(
        self, report: MachineReport, now_s: float, address: str = "", store: str = ""
    ) -> CoordinatorOrders:
        """Adds a machine that was unreachable or followed another coordinator. Its workers were started earlier.

        If the machine followed a coordinator with a later term, that coordinator may have issued views in which rounds
        were committed. This coordinator then issues no more orders and resigns, so that the launchers elect a
        coordinator that also requires a quorum of these views.
        """
        machine, known = str(report.number), report.job_state
        if known.term > self._job.views.term and self._job.over is None:
            return self._resign(f"{report.host} is back, and has followed machine {known.coordinator}", now_s)
        was_resuming, self._is_resuming = self._is_resuming, True
        self.machine_joined(machine, report.host, report.slots, now_s, address, store)
        if (found := self._registry.machines.get(machine)) is not None:
            found.has_begun, found.replicated, found.is_leaving = True, None, report.is_leaving
            if not was_resuming:
                self._job.notify(f"{found.host} is back")
        for worker in report.workers:
            self.worker_started(worker.uid, machine, now_s, worker.messages)
            if worker.stalled is not None:
                self.worker_stalled(worker.uid, worker.stalled, now_s)
        for uid, how, code in report.ended:
            if uid in report.finished and (ended := self._registry.workers.get(uid)) is not None:
                has_finished_loop(self._job, ended)
            self.worker_ended(uid, how, code, now_s)
        self.machine_listed(machine, now_s)
        self._is_resuming = was_resuming
        return [self._job.over] if self._job.over is not None else self._settle(now_s)

    def hold_back(self, until_s: float) -> bool:
        """Delays the first view until `until_s`, in case another job is running; returns False if a view exists."""
        self._job.quiet_until_s = max(self._job.quiet_until_s, until_s)
        return self._job.views.latest is None

    def machine_replicated(self, machine: str, generation: int, now_s: float) -> CoordinatorOrders:
        """Records that the machine's launcher has stored the replicated state with views up to `generation`."""
        found = self._registry.machines.get(machine)
        if found is not None:
            found.known = max(found.known, generation)
        return self._settle(now_s)

    def machine_joined(
        self, machine: str, host: str, slots: int, now_s: float, address: str = "", store: str = ""
    ) -> CoordinatorOrders:
        """Adds a new or reconnected machine, which keeps `slots` workers running once it has received a `StartOrder`.

        The caller must then report each running worker with `worker_started` and finally call `machine_listed`.
        """
        if (over := self._job.over) is not None:
            return [over]
        found = self._registry.machines.setdefault(machine, MachineRecord(machine, host, slots))
        found.slots, found.is_reachable, found.listed = slots, True, set()
        found.address, found.store = address or found.address, store or found.store
        found.replaces, found.has_left, found.has_announced_end = found.replaces or found.has_left, False, False
        return []

    def machine_listed(self, machine: str, now_s: float) -> CoordinatorOrders:
        """Marks the machine's workers as exited if they were not reported after the machine joined."""
        found = self._registry.machines.get(machine)
        if found is None or found.listed is None:
            return []
        for worker in self._registry.workers.values():
            if worker.machine is found and worker.lives and worker.uid not in found.listed:
                worker.ended, worker.was_drained = "while its machine was out of reach", False
        found.listed = None
        rules.begin_machines(self._job)
        return self._settle(now_s)

    def machine_lost(self, machine: str, why: str, now_s: float, silent_s: float = 0.0) -> CoordinatorOrders:
        """Records that the machine is unreachable. Its workers may still be running, and may be training with others.

        The user is shown the reason `why`. The last contact was `silent_s` seconds ago.
        """
        found = self._registry.machines.get(machine)
        if found is None or not found.is_reachable:
            return []
        found.is_reachable, found.lost_s = False, now_s - silent_s
        self._job.notify(f"{found.host} cannot be reached: {why}")
        rules.begin_machines(self._job)
        return self._settle(now_s)

    def machine_leaves(self, machine: str, now_s: float) -> CoordinatorOrders:
        """Records that the machine's launcher has asked its workers to exit, and will exit once they have."""
        if (found := self._registry.machines.get(machine)) is not None:
            found.is_leaving = True
        return self._settle(now_s)

    def machine_left(
        self, machine: str, why: str, now_s: float, *, has_announced_end: bool = False
    ) -> CoordinatorOrders:
        """Removes a machine whose launcher has terminated all workers and is about to exit."""
        found = self._registry.machines.get(machine)
        if found is None:
            return []
        found.slots, found.has_begun, found.replaces = 0, False, False
        found.has_left, found.has_announced_end = True, has_announced_end
        for worker in self._registry.workers.values():
            if worker.machine is found and worker.lives:
                worker.ended, worker.was_drained = f"its machine left: {why}", False
        self._job.notify(f"{found.host} left: {why}")
        rules.begin_machines(self._job)
        return self._settle(now_s)

    def slots_changed(self, machine: str, slots: int, now_s: float) -> CoordinatorOrders:
        """Records that the machine now keeps `slots` workers running, because a slot has failed repeatedly."""
        found = self._registry.machines.get(machine)
        if found is None:
            return []
        found.slots = slots
        rules.begin_machines(self._job)
        return self._settle(now_s)

    def worker_started(
        self, uid: str, machine: str, now_s: float, messages: Sequence[FromWorker] = ()
    ) -> CoordinatorOrders:
        """Records that a worker is running, or that a known worker is still running.

        If the machine was unreachable, `messages` holds the worker's messages that are still relevant.
        """
        found = self._registry.machines.get(machine)
        if found is None or self._job.over is not None:
            return []
        if found.listed is not None:
            found.listed.add(uid)
        is_known = uid in self._registry.workers
        worker = self._registry.workers.setdefault(uid, WorkerRecord(uid, found))
        if worker.lives:
            worker.runs()
            if is_known:
                self._job.remind(worker)
            is_in = any(isinstance(message, ViewInstalled) for message in messages)
            for message in messages:
                # A known request to join that a view has answered does not mean that the worker has lost its state.
                if not (isinstance(message, WorkerReady) and is_known and is_in):
                    handle_message(self._job, worker, message, now_s)
        else:  # the worker's machine was wrongly considered dead, and the other members continued
            self._job.orders.append(SendOrder(found.name, uid, ExitRequest("the others have continued without it")))
        return self._settle(now_s)

    def worker_stalled(self, uid: str, why: str, now_s: float) -> CoordinatorOrders:
        """Records that a worker is unresponsive. The caller must have reported all earlier messages from the worker.

        If the other members can continue, a forced view excludes the worker, and the worker's launcher is ordered to
        kill it. If the worker responds again, the caller must call `worker_started`.
        """
        worker = self._registry.workers.get(uid)
        if worker is None or not worker.lives:
            return []
        if worker.stalled is None:
            worker.stalled = why
            self._job.notify(worker.absence)
        return self._settle(now_s)

    def worker_ended(self, uid: str, how: str, exit_code: int, now_s: float) -> CoordinatorOrders:
        """Records that a worker has exited. The caller must have reported all messages from the worker."""
        worker = self._registry.workers.get(uid)
        if worker is None or not worker.lives:
            return []
        worker.ended, worker.exit_code = how, exit_code
        return self._settle(now_s)

    def handle_worker_message(self, uid: str, message: FromWorker, now_s: float) -> CoordinatorOrders:
        """Handles a worker's message. The messages from one worker must arrive in the order in which it sent them."""
        worker = self._registry.workers.get(uid)
        if worker is None or not worker.lives or worker.phase is WorkerPhase.DISMISSED:
            return []
        worker.runs()
        handle_message(self._job, worker, message, now_s)
        return self._settle(now_s)

    def tick(self, now_s: float) -> CoordinatorOrders:
        """Carries out the work that is due at `now_s`."""
        return self._settle(now_s)

    def _settle(self, now_s: float) -> CoordinatorOrders:
        """Returns the orders that follow from the current state, and sets `deadline_s`."""
        job = self._job
        if self._is_resuming or self._is_superseded:
            return []
        if (retirement := self._retirement()) is not None and retirement.has_resigned:
            return self._give_way(retirement, now_s)
        while job.over is None:
            job.due_s, job.lacks_quorum = [], False
            if retirement is not None:
                handover.choose_successor(job, retirement, now_s)
            if not self._step(job, now_s):
                break
        job.release()
        rules.fence(job)
        if retirement is not None and handover.may_hand_over(job, retirement, now_s):
            handover.notify_successor(job, retirement, now_s)
            job.due_s = [handover.deadline_s(retirement)]
        self._lacks_quorum_s = (self._lacks_quorum_s or now_s) if job.lacks_quorum else None
        self.resigns_s = None if self._lacks_quorum_s is None else self._lacks_quorum_s + RESIGN_S
        self.deadline_s = min(job.due_s, default=None) if job.over is None else None
        orders, job.orders = job.orders, []
        return orders if self._home is None else [*handover.replication_orders(job, int(self._home)), *orders]

    def _step(self, job: ElasticJob, now_s: float) -> bool:
        """Applies the first rule that has an effect; returns True if the rules must be applied again."""
        rules.finish_job(job, now_s)
        if job.over is not None:
            return False
        if job.views.latest is None:
            return rules.give_first_view(job, now_s)
        if rules.has_closed(job):
            return False
        if (why := rules.why_forced(job, now_s)) is not None:
            return rules.force_view(job, why, now_s)
        if rules.lacks_quorum(job, now_s):
            return False
        job.held = None
        if job.ending_s is not None:
            return False
        rules.start_transfers(job)
        return rules.change_membership(job, now_s)

    def _resign(self, reason: str, now_s: float) -> CoordinatorOrders:
        """Stops coordinating, because another coordinator has taken over in the meantime."""
        self._is_superseded = True
        self.resigns_s, self.deadline_s, self._job.orders = now_s, None, []
        return [NotifyOrder(f"{reason}, which has coordinated since; the launchers elect a coordinator again")]

    def _retirement(self) -> CoordinatorHandover | None:
        home = self._registry.machines.get(self._home or "")
        if self.retirement is None and home is not None and home.is_leaving:
            self.retirement = CoordinatorHandover(home, self._job.views.store)
        return self.retirement

    def _give_way(self, retirement: CoordinatorHandover, now_s: float) -> CoordinatorOrders:
        """Hands over to the successor. The machines report all later events to the successor, which handles them."""
        self._job.orders = []
        orders = handover.notify_others(self._job, retirement, now_s)
        self._lacks_quorum_s = self.resigns_s = None
        self.deadline_s = None if retirement.is_over else handover.deadline_s(retirement)
        return [] if orders is None else [*handover.replication_orders(self._job, int(retirement.home.name)), *orders]


def handle_message(job: ElasticJob, worker: WorkerRecord, message: FromWorker, now_s: float) -> None:
    """Updates the job according to a worker's message."""
    match message:
        case WorkerReady():
            _handle_join_request(job, worker, message, now_s)
        case TransferReady():
            rules.offer_transfer(job, worker, message)
        case CaughtUp():
            rules.mark_caught_up(job, worker, now_s)
        case ViewInstalled():
            job.breaks.committed(message.round)
            job.views.entered(worker, message.generation)
        case ViewFailed():
            _broke(job, worker, message, now_s)
        case LeaveNotice():
            worker.leaving = worker.leaving or message.reason
            if worker.phase is not WorkerPhase.MEMBER:
                job.dismiss(worker, f"asked to leave: {message.reason}")
        case LoopFinished():
            has_finished_loop(job, worker)


def has_finished_loop(job: ElasticJob, worker: WorkerRecord) -> None:
    """Records that a worker has completed its training loop."""
    if not worker.has_finished:
        worker.has_finished = True
        job.finished.append(worker)


def _handle_join_request(job: ElasticJob, worker: WorkerRecord, message: WorkerReady, now_s: float) -> None:
    """Handles a request to join. A member that sends such a request no longer holds the state."""
    if worker.phase is WorkerPhase.MEMBER and worker.has_state:
        worker.loses_state()
    rules.reset_transfer(job, worker, message)
    if worker.phase is not WorkerPhase.OUTSIDE:
        return
    worker.fingerprint = message.fingerprint
    if job.dismiss_needless(worker):
        return
    if job.fingerprint is not None and job.fingerprint != message.fingerprint:
        rules.refuse_worker(job, worker, job.fingerprint)
    else:
        worker.phase, worker.ready_s = WorkerPhase.READY, now_s
        rules.resend_offers(job, worker)


def _broke(job: ElasticJob, worker: WorkerRecord, message: ViewFailed, now_s: float) -> None:
    """Records broken connections, unless the worker was sent a later view that replaces the connections."""
    views, breaks = job.views, job.breaks
    breaks.committed(message.round)
    generation = message.generation
    if worker.phase is not WorkerPhase.MEMBER or views.base is None:
        return
    if generation < max(views.base.generation, worker.since):
        return
    if not worker.has_state and worker not in views.base_team:
        if message.round < 0:
            worker.phase = WorkerPhase.READY
            return
        worker.has_state = True  # the worker caught up or received the state before its connections broke
    report = ConnectionFailure(generation, now_s + job.policy.break_patience_s)
    breaks.reported(worker.uid, report, message.reason)
