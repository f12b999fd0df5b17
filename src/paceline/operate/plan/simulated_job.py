"""SimulatedJob: an elastic job with failures, simulated in virtual time with the launcher's real coordinator.

`SimulatedWorker` models a worker's messages and the views that it enters. `SimulatedView` models the connections
between the members of a view, and breaks when a member dies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.protocol import (
    CaughtUp,
    CoordinatorOrders,
    EndOrder,
    ExitRequest,
    FromWorker,
    SendOrder,
    StartOrder,
    StateTransfer,
    ToWorker,
    TransferOffer,
    TransferReady,
    View,
    ViewFailed,
    ViewInstalled,
    WorkerReady,
)

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

_MOST_EVENTS = 5_000_000
_NEVER_S = 1e12
_CALM_S = 90.0  # no failure occurs before this time, while all workers start


@dataclass(frozen=True)
class EventTimes:
    """Durations of the events in a job, in seconds.

    The defaults are medians measured with `bench/elastic.py` and `bench/death.py` on two cores.

    Attributes:
        step_s: the duration of a step of the full job without disturbances.
        noticing_s: the time from a process's death until the other workers are notified.
        silence_s: the time until a machine that failed without closing its connections is declared lost.
        message_s: the latency of a message between a worker and the coordinator.
        forming_s: the time that a member takes to leave its old group and to prepare the group of a new view.
        rendezvous_s: the time from the preparation of a new view's group until its members are connected; 0 for one
            member.
        starting_s: the time until a worker's replacement on the same machine is ready, if it uses a spare interpreter.
        repair_s: the time until another machine replaces a lost machine.
        copying_s: the time until a new worker has the state.
        slowness: the factor by which steps slow down while a new worker copies the state; at least 1.
        replaying: the time that a new worker takes to replay one step completed during the copy, as a fraction of a
            step.
        saving_s: the time by which a checkpoint delays training.
        restarting_s: the time until all workers run again and have loaded a checkpoint.
    """

    step_s: float
    noticing_s: float = 0.009
    silence_s: float = 2.0
    message_s: float = 0.001
    forming_s: float = 0.03
    rendezvous_s: float = 0.05
    starting_s: float = 0.3
    repair_s: float = 600.0
    copying_s: float = 1.0
    slowness: float = 1.3
    replaying: float = 0.3
    saving_s: float = 1.0
    restarting_s: float = 60.0

    def problem(self) -> str | None:
        """Returns a message about a value that is out of range, or None."""
        if self.step_s <= 0:
            return f"step_s is {self.step_s}; it must be positive"
        negative = next((name for name, value in vars(self).items() if value < 0), None)
        if negative is not None:
            return f"{negative} is {getattr(self, negative)}; times must not be negative"
        if self.slowness < 1 or self.replaying >= 1:
            return (
                f"slowness is {self.slowness} and replaying {self.replaying}; they must be at least 1 and less than 1"
            )
        return None


@dataclass(frozen=True)
class MeanTimesBetweenFailures:
    """Mean times between failures, in seconds; 0 for never. Failures are independent Poisson processes.

    Attributes:
        worker_s: the mean time between failures of a worker process. The machine then replaces the process.
        machine_s: the mean time between failures of a machine, with all its workers.
        job_s: the mean time between failures of the whole job, such as a power outage or the end of a reservation. Only
            checkpoints survive such a failure.
    """

    worker_s: float = 0.0
    machine_s: float = 30 * DAY_S
    job_s: float = 0.0

    def rate(self, machines: int, per_machine: int) -> float:
        """Returns the number of machine and worker failures per second, excluding failures of the whole job."""
        rate = machines / self.machine_s if self.machine_s else 0.0
        return rate + (machines * per_machine / self.worker_s if self.worker_s else 0.0)


class SimulatedWorker:
    """A process of the job. Its state is starting, ready, learning, caught up, forming, working, broken or gone.

    `trains` is set once the process has been in a view that all members entered. The process takes a snapshot for each
    entry in `transfers` at the end of the step.
    """

    __slots__ = ("group", "job", "latest", "machine", "state", "trains", "transfer", "transfers", "uid")

    def __init__(self, job: SimulatedJob, uid: str, machine: str) -> None:
        self.job, self.uid, self.machine = job, uid, machine
        self.state = "starting"
        self.trains = False
        self.group: SimulatedView | None = None
        self.latest: View | None = None
        self.transfer = 0
        self.transfers: list[StateTransfer] = []

    def started(self) -> None:
        """Handles the start of the training loop."""
        if self.state == "starting":
            self.state = "ready"
            self.job.send(self, WorkerReady("", can_catch_up=True))

    def receive(self, message: ToWorker) -> None:
        """Handles a message from the coordinator."""
        if self.state == "gone":
            return
        if isinstance(message, View):
            self._receive_view(message)
        elif isinstance(message, StateTransfer):
            if self.uid in message.senders:
                self.transfers.append(message)
        elif isinstance(message, TransferOffer):
            self._fetch_state(message)
        elif isinstance(message, ExitRequest):
            self.job.end_worker(self, message.code)

    def _receive_view(self, view: View) -> None:
        if self.latest is not None and view.generation <= self.latest.generation:
            return
        self.latest = view
        if self.uid in view.members:
            if not view.is_planned or not self.trains:
                self.enter(view)
            elif self.group is not None:
                self.group.planned = view
        elif self.trains:
            self.job.end_worker(self, 75)
        elif self.group is not None and not view.is_planned:
            # The view that this worker was about to join is obsolete, so the worker announces itself again.
            self.job.send(self, ViewFailed(self.group.view.generation, self.job.steps, "there is a later view"))
            self.state, self.group = "caught up", None
            self.job.send(self, CaughtUp(self.job.steps))

    def enter(self, view: View) -> None:
        """Joins the group of a view."""
        if self.group is not None and self.group.view.generation < view.generation:
            self.group.is_closed = True
        self.state, self.group = "forming", self.job.group(view)
        self.group.arrive(self)

    def _fetch_state(self, offer: TransferOffer) -> None:
        if self.state == "ready" and offer.transfer > self.transfer:
            self.state, self.transfer = "learning", offer.transfer
            times = self.job.times
            # The other workers complete steps while this worker copies the state, and more steps while this worker
            # replays the first ones.
            takes_s = times.copying_s / (1 - times.replaying)
            self.job.receivers += 1
            self.job.after(times.copying_s, self._copied)
            self.job.after(takes_s, self._caught_up)

    def _copied(self) -> None:
        self.job.receivers -= 1

    def _caught_up(self) -> None:
        if self.state == "learning":
            self.state = "caught up"
            self.job.send(self, CaughtUp(self.job.steps))


class SimulatedView:
    """The connections between the members of a view."""

    __slots__ = ("arrived", "begun_s", "is_closed", "job", "lasts_s", "planned", "view")

    def __init__(self, job: SimulatedJob, view: View) -> None:
        self.job, self.view = job, view
        self.arrived: dict[str, SimulatedWorker] = {}
        self.is_closed = False
        self.planned: View | None = None
        self.begun_s = self.lasts_s = 0.0

    def arrive(self, worker: SimulatedWorker) -> None:
        """Handles the arrival of a member. Once all members have arrived, they prepare and then connect."""
        self.arrived[worker.uid] = worker
        if not self.is_closed and len(self.arrived) == len(self.view.members):
            times = self.job.times
            self.job.after(times.forming_s + (times.rendezvous_s if len(self.arrived) > 1 else 0.0), self._formed)

    def _formed(self) -> None:
        if self.is_closed:
            return
        for worker in self.arrived.values():
            worker.state, worker.trains = "working", True
            self.job.send(worker, ViewInstalled(self.view.generation, self.job.steps))
        if self.planned is None and not self.view.must_wait:
            self.begin_step()
        elif self.planned is not None:
            self._enter_planned(self.planned)

    def begin_step(self) -> None:
        """Schedules the end of the current step and of all further steps before the next event."""
        job = self.job
        self.begun_s = job.now_s
        self.lasts_s = job.left_s * job.slowness_of(len(self.view.members))
        steps = job.steps_until_event(self.lasts_s)
        job.after(steps * self.lasts_s, self._commit, steps)

    def _commit(self, steps: int) -> None:
        if self.is_closed:
            return
        job = self.job
        job.commit(steps)
        for worker in list(self.arrived.values()):
            for transfer in worker.transfers:
                job.send(worker, TransferReady(transfer.number, job.steps, worker.uid))
            worker.transfers.clear()
        if self.planned is not None:
            self._enter_planned(self.planned)
        elif not self.view.must_wait:
            self.begin_step()

    def _enter_planned(self, view: View) -> None:
        self.is_closed = True
        for worker in list(self.arrived.values()):
            if worker.uid in view.members:
                worker.enter(view)
            else:
                self.job.end_worker(worker, 0)

    def lose(self, workers: int, notice_s: float) -> None:
        """Removes members. The remaining members keep their progress in the step and are notified after `notice_s`."""
        if self.is_closed:
            return
        self.is_closed = True
        self.job.keep_progress(self, workers)
        self.job.after(notice_s, self._break)

    def _break(self) -> None:
        for worker in self.arrived.values():
            if worker.group is self and worker.state in ("forming", "working"):
                worker.state = "broken"
                self.job.send(worker, ViewFailed(self.view.generation, self.job.steps, "a peer is gone"))


@dataclass
class JobOutcome:
    """The result of a simulated job.

    Attributes:
        seconds: the time since the first step of the job.
        steps: the number of committed steps.
        pauses_s: for each failure, the delay of the step in which it happened.
        is_lost: whether the training state was lost with the last worker that held the state.
        end: the coordinator's reason for ending the job, or "".
    """

    seconds: float = 0.0
    steps: int = 0
    pauses_s: list[float] = field(default_factory=list)
    is_lost: bool = False
    end: str = ""


class SimulatedJob:
    """Simulation of one job.

    Args:
        machines: the number of machines.
        per_machine: the number of workers on each machine.
        times: the durations of the job's events.
        failures: the mean times between failures; failures of the whole job are not simulated.
        seed: the seed for the random times of failures.
        share: a worker's fraction of all work, if only some of the workers are simulated.
        min_workers: the minimum number of workers. The job waits while it has fewer workers.
    """

    def __init__(
        self,
        machines: int,
        per_machine: int,
        times: EventTimes,
        failures: MeanTimesBetweenFailures,
        seed: int,
        *,
        share: float | None = None,
        min_workers: int = 1,
    ) -> None:
        self.times, self._failures, self._per_machine = times, failures, per_machine
        self._workers_in_all = machines * per_machine
        self._share = 1 / self._workers_in_all if share is None else share
        self._random = Random(seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self.now_s = 0.0
        self._coordinator = Coordinator(CoordinatorPolicy(min_workers=min_workers, start_patience_s=60.0), 0.0)
        self._ticks_s: float | None = None
        self._machines: dict[str, list[SimulatedWorker]] = {}
        self._workers: dict[str, SimulatedWorker] = {}
        self._groups: dict[int, SimulatedView] = {}
        self._names = 0
        self.receivers = 0
        self.steps = 0
        self.left_s = times.step_s  # remaining time of the current step
        self._began_s: float | None = None
        self._committed_s = 0.0
        self._recent_failures = 0  # number of failures since the last step
        self._outcome = JobOutcome()
        self._has_ended = False
        for _ in range(machines):
            self._add_machine()

    def play(self, failures: int) -> JobOutcome:
        """Runs until the job has recovered from `failures` failures, or ends."""
        self.after(_CALM_S + self._next_failure_s(), self._fail, failures)
        self._run(lambda: self._has_ended)
        return self._result()

    def partition(self, machines: int) -> JobOutcome:
        """Cuts off `machines` machines at once and runs until the other machines complete a step or the job ends."""
        self.after(_CALM_S, self._cut_off, machines)
        self._run(lambda: self._has_ended or bool(self._outcome.pauses_s))
        return self._result()

    def _run(self, is_done: Callable[[], bool]) -> None:
        while self._heap and not is_done():
            self._count += 1
            if self._count > _MOST_EVENTS:
                raise RuntimeError(f"the job does not end: {self.steps} steps, {len(self._outcome.pauses_s)} failures")
            self.now_s, _, call, args = heappop(self._heap)
            call(*args)

    def _result(self) -> JobOutcome:
        self._outcome.steps = self.steps
        self._outcome.seconds = self.now_s - (self._began_s or 0.0)
        return self._outcome

    def _cut_off(self, machines: int) -> None:
        self._recent_failures += 1
        for name in list(self._machines)[-machines:]:
            self._lose_machine(name)

    # - Interface for workers and groups

    def after(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        """Schedules a call after `delay_s`."""
        self._count += 1
        heappush(self._heap, (self.now_s + delay_s, self._count, call, args))

    def send(self, worker: SimulatedWorker, message: FromWorker) -> None:
        """Sends a worker's message to the coordinator."""
        self.after(self.times.message_s, self._receive, worker.uid, message)

    def group(self, view: View) -> SimulatedView:
        """Returns the simulated connections of a view."""
        found = self._groups.get(view.generation)
        if found is None:
            found = self._groups[view.generation] = SimulatedView(self, view)
            for old, group in list(self._groups.items()):
                if old < view.generation and group.is_closed:
                    del self._groups[old]
        return found

    def slowness_of(self, members: int) -> float:
        """Returns the factor by which a step slows down if all the work is divided among `members`."""
        missing = min(0.99, (self._workers_in_all - members) * self._share)
        return (self.times.slowness if self.receivers else 1.0) / (1 - missing)

    def keep_progress(self, group: SimulatedView, lost: int) -> None:
        """Keeps the survivors' progress in the step; the survivors must redo the work of lost workers."""
        if group.lasts_s:
            done = min(1.0, (self.now_s - group.begun_s) / group.lasts_s)
            share = lost * self._share
            # The remaining work of the step, expressed as the time that the full set of workers would take.
            self.left_s = self.left_s * (1 - done) * (1 - share) + self.times.step_s * share
        group.lasts_s = 0.0

    def steps_until_event(self, lasts_s: float) -> int:
        """Returns the number of whole steps before the next event, at least 1."""
        if self._recent_failures or self.left_s != self.times.step_s or not self._heap:
            return 1
        return max(1, int(min((self._heap[0][0] - self.now_s) / lasts_s, 1e9)))

    def commit(self, steps: int) -> None:
        """Commits steps, and records the pauses of recent failures."""
        if self._began_s is None:
            self._began_s = self.now_s
        elif self._recent_failures:
            pause_s = self.now_s - self._committed_s - self.times.step_s
            self._outcome.pauses_s += [pause_s] * self._recent_failures
        self._recent_failures = 0
        self.steps += steps
        self._committed_s = self.now_s
        self.left_s = self.times.step_s

    def end_worker(self, worker: SimulatedWorker, code: int) -> None:
        """Terminates a process. The launcher reports the exit and starts a replacement."""
        if worker.state == "gone":
            return
        group, worker.state, worker.group = worker.group, "gone", None
        machine = self._machines.get(worker.machine)
        if group is not None and worker.uid in group.view.members:
            group.lose(1, self.times.noticing_s)
        if machine is None:
            return
        machine.remove(worker)
        self.after(self.times.message_s, self._report_end, worker.uid, code)
        self._start_worker(worker.machine)

    # - Failures

    def _next_failure_s(self) -> float:
        rate = self._failures.rate(len(self._machines), self._per_machine)
        return self._random.expovariate(rate) if rate else _NEVER_S

    def _fail(self, left: int) -> None:
        if left == 0:
            if self._recent_failures:  # a new failure is delayed until the job has recovered from the previous failure
                self.after(self.times.step_s, self._fail, 0)
            else:
                self._has_ended = True
            return
        failures, machines = self._failures, list(self._machines)
        machine_rate = len(machines) / failures.machine_s if failures.machine_s else 0.0
        if machines:
            self._recent_failures += 1
            if self._random.random() * failures.rate(len(machines), self._per_machine) < machine_rate:
                self._lose_machine(self._random.choice(machines))
            else:
                living = self._machines[self._random.choice(machines)]
                if living:
                    self.end_worker(self._random.choice(living), -9)
        self.after(max(self._next_failure_s(), 1e-9), self._fail, left - 1)

    def _lose_machine(self, name: str) -> None:
        """Removes a machine without closing its connections, as in a power failure.

        A new machine joins after repair.
        """
        workers = self._machines.pop(name)
        groups = Counter(worker.group for worker in workers)
        for worker in workers:
            worker.state, worker.group = "gone", None
        for group, lost in groups.items():
            if group is not None:
                group.lose(lost, self.times.silence_s)
        self.after(self.times.silence_s, self._declare_lost, name)
        self.after(self.times.repair_s, self._add_machine)

    def _declare_lost(self, name: str) -> None:
        silent_s = self.times.silence_s
        self._obey(self._coordinator.machine_lost(name, f"silent for {silent_s:g} s", self.now_s, silent_s))

    # - Machines and the coordinator

    def _add_machine(self) -> None:
        name = str(self._names)
        self._names += 1
        self._machines[name] = []
        self._obey(self._coordinator.machine_joined(name, f"host-{name}", self._per_machine, self.now_s))
        self._obey(self._coordinator.machine_listed(name, self.now_s))

    def _start_worker(self, machine: str) -> None:
        uid = f"{machine}.{self._names}.{self._count}"
        worker = self._workers[uid] = SimulatedWorker(self, uid, machine)
        self._machines[machine].append(worker)
        self.after(self.times.message_s, self._report_start, uid)
        self.after(self.times.starting_s, worker.started)

    def _report_start(self, uid: str) -> None:
        self._obey(self._coordinator.worker_started(uid, self._workers[uid].machine, self.now_s))

    def _report_end(self, uid: str, code: int) -> None:
        self._obey(self._coordinator.worker_ended(uid, f"exit code {code}", code, self.now_s))
        del self._workers[uid]

    def _receive(self, uid: str, message: FromWorker) -> None:
        self._obey(self._coordinator.handle_worker_message(uid, message, self.now_s))

    def _tick(self, due_s: float) -> None:
        if self._ticks_s == due_s:
            self._ticks_s = None
            self._obey(self._coordinator.tick(self.now_s))

    def _obey(self, orders: CoordinatorOrders) -> None:
        for order in orders:
            if isinstance(order, SendOrder):
                if (worker := self._workers.get(order.uid)) is not None:
                    self.after(self.times.message_s, worker.receive, order.message)
            elif isinstance(order, StartOrder):
                for _ in range(self._per_machine):
                    self._start_worker(order.machine)
            elif isinstance(order, EndOrder):
                self._has_ended = True
                self._outcome.end, self._outcome.is_lost = order.reason, order.code != 0
        due_s = self._coordinator.deadline_s
        if due_s is not None and due_s != self._ticks_s:
            self._ticks_s = due_s
            self.after(max(due_s - self.now_s, 0.0), self._tick, due_s)
