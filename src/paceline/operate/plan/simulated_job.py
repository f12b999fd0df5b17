"""An elastic job with failures, in virtual time: the coordinator is the one that a launcher runs.

How long the parts of a death, a join and a restart take, and how often machines fail.

A worker as the coordinator sees one: what it says, and when it enters views.

A group stands for the connections of one view's members. Its members make steps together; it breaks when one is gone.
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
    Broken,
    CaughtUp,
    CoordinatorOrders,
    Dismissed,
    EndOrder,
    FromWorker,
    Installed,
    Ready,
    SendOrder,
    StartOrder,
    StateTransfer,
    ToWorker,
    TransferOffer,
    TransferReady,
    View,
)

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class EventTimes:
    """Seconds of one job's events. The defaults are medians of `bench/elastic.py` and `bench/death.py` on two cores.

    Attributes:
        step_s: a step of the whole job, while nothing happens.
        noticing_s: from the death of a process until the others know.
        silence_s: from the loss of a machine, which closes no connection, until it is given up.
        message_s: from a worker to the coordinator, or back.
        forming_s: a member's own work for a new view: it leaves the old group and makes ready for the next one.
        meeting_s: until the members of a new view are connected, after that; a single member has nobody to meet.
        starting_s: until a worker that replaces another on its machine is ready; a spare interpreter stands by.
        repair_s: until another machine takes the place of a lost one.
        copying_s: until a newcomer has the state.
        slowness: of the others' steps while a newcomer copies; 1 if they do not notice.
        replaying: how long a newcomer takes for a step that the others have made meanwhile, as a share of a step.
        saving_s: by how much a checkpoint delays the training.
        restarting_s: until all workers run again and have loaded a checkpoint.
    """

    step_s: float
    noticing_s: float = 0.009
    silence_s: float = 2.0
    message_s: float = 0.001
    forming_s: float = 0.03
    meeting_s: float = 0.05
    starting_s: float = 0.3
    repair_s: float = 600.0
    copying_s: float = 1.0
    slowness: float = 1.3
    replaying: float = 0.3
    saving_s: float = 1.0
    restarting_s: float = 60.0

    def problem(self) -> str | None:
        """Returns what cannot be among the times, None if all can."""
        if self.step_s <= 0:
            return f"step_s is {self.step_s}; a step takes time"
        negative = next((name for name, value in vars(self).items() if value < 0), None)
        if negative is not None:
            return f"{negative} is {getattr(self, negative)}; no time is negative"
        if self.slowness < 1 or self.replaying >= 1:
            return f"slowness is {self.slowness} and replaying {self.replaying}; they are at least 1 and less than 1"
        return None


@dataclass(frozen=True)
class MeanTimesBetweenFailures:
    """Mean times between failures, in seconds; 0 for never. Failures are independent of each other (Poisson).

    Attributes:
        worker_s: of each worker's process, which its machine replaces.
        machine_s: of each machine, with all its workers.
        job_s: of everything at once: a power cut, or a reservation that ends. Only checkpoints survive it.
    """

    worker_s: float = 0.0
    machine_s: float = 30 * DAY_S
    job_s: float = 0.0

    def rate(self, machines: int, per_machine: int) -> float:
        """Returns the failures a second of so many machines, without those of everything at once."""
        rate = machines / self.machine_s if self.machine_s else 0.0
        return rate + (machines * per_machine / self.worker_s if self.worker_s else 0.0)


class SimulatedWorker:
    """A process of the job. It is starting, ready, learning, caught up, forming, working, broken, or gone."""

    __slots__ = ("group", "job", "latest", "machine", "state", "trains", "transfer", "transfers", "uid")

    def __init__(self, job: SimulatedJob, uid: str, machine: str) -> None:
        self.job, self.uid, self.machine = job, uid, machine
        self.state = "starting"
        self.trains = False  # it has been in a view whose members had all come
        self.group: SimulatedView | None = None
        self.latest: View | None = None
        self.transfer = 0
        self.transfers: list[StateTransfer] = []  # for which it takes a snapshot at the end of the step

    def started(self) -> None:
        """The script has come to its loop."""
        if self.state == "starting":
            self.state = "ready"
            self.job.says(self, Ready("", learns=True))

    def hear(self, message: ToWorker) -> None:
        """The coordinator says something."""
        if self.state == "gone":
            return
        if isinstance(message, View):
            self._hear_view(message)
        elif isinstance(message, StateTransfer):
            if self.uid in message.senders:
                self.transfers.append(message)
        elif isinstance(message, TransferOffer):
            self._learn(message)
        elif isinstance(message, Dismissed):
            self.job.ends(self, message.code)

    def _hear_view(self, view: View) -> None:
        if self.latest is not None and view.generation <= self.latest.generation:
            return
        self.latest = view
        if self.uid in view.members:
            if not view.is_planned or not self.trains:
                self.enter(view)
            elif self.group is not None:
                self.group.planned = view
        elif self.trains:
            self.job.ends(self, 75)
        elif self.group is not None and not view.is_planned:
            # It was to come in by a view that nobody enters any more, and tries again.
            self.job.says(self, Broken(self.group.view.generation, self.job.steps, "there is a later view"))
            self.state, self.group = "caught up", None
            self.job.says(self, CaughtUp(self.job.steps))

    def enter(self, view: View) -> None:
        """Meets the members of a view."""
        if self.group is not None and self.group.view.generation < view.generation:
            self.group.is_over = True
        self.state, self.group = "forming", self.job.group(view)
        self.group.arrive(self)

    def _learn(self, offer: TransferOffer) -> None:
        if self.state == "ready" and offer.transfer > self.transfer:
            self.state, self.transfer = "learning", offer.transfer
            times = self.job.times
            # While it copies, the others go on; and while it makes their steps, they make further ones.
            takes_s = times.copying_s / (1 - times.replaying)
            self.job.receivers += 1
            self.job.after(times.copying_s, self._copied)
            self.job.after(takes_s, self._caught_up)

    def _copied(self) -> None:
        self.job.receivers -= 1

    def _caught_up(self) -> None:
        if self.state == "learning":
            self.state = "caught up"
            self.job.says(self, CaughtUp(self.job.steps))


class SimulatedView:
    """The connections of a view."""

    __slots__ = ("arrived", "begun_s", "ends_s", "is_over", "job", "lasts_s", "planned", "view")

    def __init__(self, job: SimulatedJob, view: View) -> None:
        self.job, self.view = job, view
        self.arrived: dict[str, SimulatedWorker] = {}
        self.is_over = False
        self.planned: View | None = None
        self.begun_s = self.lasts_s = 0.0

    def arrive(self, worker: SimulatedWorker) -> None:
        """A member has come. Once all have, they make ready, and are connected a while later."""
        self.arrived[worker.uid] = worker
        if not self.is_over and len(self.arrived) == len(self.view.members):
            times = self.job.times
            self.job.after(times.forming_s + (times.meeting_s if len(self.arrived) > 1 else 0.0), self._formed)

    def _formed(self) -> None:
        if self.is_over:
            return
        for worker in self.arrived.values():
            worker.state, worker.trains = "working", True
            self.job.says(worker, Installed(self.view.generation, self.job.steps))
        if self.planned is None and not self.view.must_wait:
            self.begin_step()
        elif self.planned is not None:
            self._enter_planned(self.planned)

    def begin_step(self) -> None:
        """Computes what is left of the step."""
        job = self.job
        self.begun_s = job.now_s
        self.lasts_s = job.left_s * job.slowness_of(len(self.view.members))
        steps = job.steps_until_news(self.lasts_s)
        job.after(steps * self.lasts_s, self._commit, steps)

    def _commit(self, steps: int) -> None:
        if self.is_over:
            return
        job = self.job
        job.committed(steps)
        for worker in list(self.arrived.values()):
            for transfer in worker.transfers:
                job.says(worker, TransferReady(transfer.number, job.steps, worker.uid))
            worker.transfers.clear()
        if self.planned is not None:
            self._enter_planned(self.planned)
        elif not self.view.must_wait:
            self.begin_step()

    def _enter_planned(self, view: View) -> None:
        self.is_over = True
        for worker in list(self.arrived.values()):
            if worker.uid in view.members:
                worker.enter(view)
            else:
                self.job.ends(worker, 0)

    def lose(self, workers: int, notices_s: float) -> None:
        """So many members are gone: the others keep what they have computed, and notice after that time."""
        if self.is_over:
            return
        self.is_over = True
        self.job.keep(self, workers)
        self.job.after(notices_s, self._broke)

    def _broke(self) -> None:
        for worker in self.arrived.values():
            if worker.group is self and worker.state in ("forming", "working"):
                worker.state = "broken"
                self.job.says(worker, Broken(self.view.generation, self.job.steps, "a peer is gone"))


_MOST_EVENTS = 5_000_000
_NEVER_S = 1e12
_CALM_S = 90.0  # in which all workers start, before anything fails


@dataclass
class JobOutcome:
    """What a job went through.

    Attributes:
        seconds: from its first step on.
        steps: that were committed.
        pauses_s: for each failure, by how much the step in which it happened took longer than others.
        is_lost: nobody was left who had the state.
        end: why the coordinator ended the job, if it did.
    """

    seconds: float = 0.0
    steps: int = 0
    pauses_s: list[float] = field(default_factory=list)
    is_lost: bool = False
    end: str = ""


class SimulatedJob:
    """One job.

    Args:
        machines: how many there are.
        per_machine: workers of each.
        times: how long everything takes.
        failures: how often something fails; those of everything at once are not played.
        seed: decides when.
        share: the share of all work that a worker has, if there are more than those played.
        min_workers: with fewer, the job waits.
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
        self.left_s = times.step_s  # of the step that is being computed
        self._began_s: float | None = None
        self._committed_s = 0.0
        self._hurt = 0  # failures since the last step
        self._played = JobOutcome()
        self._is_over = False
        for _ in range(machines):
            self._joins()

    def play(self, failures: int) -> JobOutcome:
        """Plays until so many failures have happened and are over, or the job ends."""
        self.after(_CALM_S + self._next_failure_s(), self._fails, failures)
        self._run(lambda: self._is_over)
        return self._result()

    def part(self, machines: int) -> JobOutcome:
        """Cuts off so many machines at once, and plays until the others have made a step, or the job ends."""
        self.after(_CALM_S, self._cut_off, machines)
        self._run(lambda: self._is_over or bool(self._played.pauses_s))
        return self._result()

    def _run(self, is_done: Callable[[], bool]) -> None:
        while self._heap and not is_done():
            self._count += 1
            if self._count > _MOST_EVENTS:
                raise RuntimeError(f"the job does not end: {self.steps} steps, {len(self._played.pauses_s)} failures")
            self.now_s, _, call, args = heappop(self._heap)
            call(*args)

    def _result(self) -> JobOutcome:
        self._played.steps = self.steps
        self._played.seconds = self.now_s - (self._began_s or 0.0)
        return self._played

    def _cut_off(self, machines: int) -> None:
        self._hurt += 1
        for name in list(self._machines)[-machines:]:
            self._vanishes(name)

    # What workers and groups call

    def after(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        """Calls after that time."""
        self._count += 1
        heappush(self._heap, (self.now_s + delay_s, self._count, call, args))

    def says(self, worker: SimulatedWorker, message: FromWorker) -> None:
        """A worker speaks to the coordinator."""
        self.after(self.times.message_s, self._hears, worker.uid, message)

    def group(self, view: View) -> SimulatedView:
        """Returns the connections of a view."""
        found = self._groups.get(view.generation)
        if found is None:
            found = self._groups[view.generation] = SimulatedView(self, view)
            for old in [number for number in self._groups if number < view.generation and self._groups[number].is_over]:
                del self._groups[old]
        return found

    def slowness_of(self, members: int) -> float:
        """Returns how many times as long a step takes with so many members, to whom all the work is dealt out."""
        missing = min(0.99, (self._workers_in_all - members) * self._share)
        return (self.times.slowness if self.receivers else 1.0) / (1 - missing)

    def keep(self, group: SimulatedView, lost: int) -> None:
        """Keeps what the survivors have computed of the step; what the lost ones were to do is left for the others."""
        if group.lasts_s:
            done = min(1.0, (self.now_s - group.begun_s) / group.lasts_s)
            share = lost * self._share
            # Of the whole step, in units of a step with all workers.
            self.left_s = self.left_s * (1 - done) * (1 - share) + self.times.step_s * share
        group.lasts_s = 0.0

    def steps_until_news(self, lasts_s: float) -> int:
        """Returns how many whole steps are made until something else happens, at least 1."""
        if self._hurt or self.left_s != self.times.step_s or not self._heap:
            return 1
        return max(1, int(min((self._heap[0][0] - self.now_s) / lasts_s, 1e9)))

    def committed(self, steps: int) -> None:
        """Steps are everybody's."""
        if self._began_s is None:
            self._began_s = self.now_s
        elif self._hurt:
            pause_s = self.now_s - self._committed_s - self.times.step_s
            self._played.pauses_s += [pause_s] * self._hurt
        self._hurt = 0
        self.steps += steps
        self._committed_s = self.now_s
        self.left_s = self.times.step_s

    def ends(self, worker: SimulatedWorker, code: int) -> None:
        """A process has ended, or was killed: its launcher reports it, and starts another."""
        if worker.state == "gone":
            return
        group, worker.state, worker.group = worker.group, "gone", None
        machine = self._machines.get(worker.machine)
        if group is not None and worker.uid in group.view.members:
            group.lose(1, self.times.noticing_s)
        if machine is None:
            return
        machine.remove(worker)
        self.after(self.times.message_s, self._reports_end, worker.uid, code)
        self._starts(worker.machine)

    # Failures

    def _next_failure_s(self) -> float:
        rate = self._failures.rate(len(self._machines), self._per_machine)
        return self._random.expovariate(rate) if rate else _NEVER_S

    def _fails(self, left: int) -> None:
        if left == 0:
            if self._hurt:  # the job recovers from the last failure first
                self.after(self.times.step_s, self._fails, 0)
            else:
                self._is_over = True
            return
        failures, machines = self._failures, list(self._machines)
        of_machines = len(machines) / failures.machine_s if failures.machine_s else 0.0
        if machines:
            self._hurt += 1
            if self._random.random() * failures.rate(len(machines), self._per_machine) < of_machines:
                self._vanishes(self._random.choice(machines))
            else:
                living = self._machines[self._random.choice(machines)]
                if living:
                    self.ends(self._random.choice(living), -9)
        self.after(max(self._next_failure_s(), 1e-9), self._fails, left - 1)

    def _vanishes(self, name: str) -> None:
        """A machine loses its power: nobody is told, and its place is empty until another comes."""
        workers = self._machines.pop(name)
        groups = Counter(worker.group for worker in workers)
        for worker in workers:
            worker.state, worker.group = "gone", None
        for group, lost in groups.items():
            if group is not None:
                group.lose(lost, self.times.silence_s)
        self.after(self.times.silence_s, self._is_given_up, name)
        self.after(self.times.repair_s, self._joins)

    def _is_given_up(self, name: str) -> None:
        silent_s = self.times.silence_s
        self._obey(self._coordinator.machine_lost(name, f"silent for {silent_s:g} s", self.now_s, silent_s))

    # Machines and the coordinator

    def _joins(self) -> None:
        name = str(self._names)
        self._names += 1
        self._machines[name] = []
        self._obey(self._coordinator.machine_joined(name, f"host-{name}", self._per_machine, self.now_s))
        self._obey(self._coordinator.machine_listed(name, self.now_s))

    def _starts(self, machine: str) -> None:
        uid = f"{machine}.{self._names}.{self._count}"
        worker = self._workers[uid] = SimulatedWorker(self, uid, machine)
        self._machines[machine].append(worker)
        self.after(self.times.message_s, self._reports_start, uid)
        self.after(self.times.starting_s, worker.started)

    def _reports_start(self, uid: str) -> None:
        self._obey(self._coordinator.worker_started(uid, self._workers[uid].machine, self.now_s))

    def _reports_end(self, uid: str, code: int) -> None:
        self._obey(self._coordinator.worker_ended(uid, f"exit code {code}", code, self.now_s))
        del self._workers[uid]

    def _hears(self, uid: str, message: FromWorker) -> None:
        self._obey(self._coordinator.worker_said(uid, message, self.now_s))

    def _tick(self, due_s: float) -> None:
        if self._ticks_s == due_s:
            self._ticks_s = None
            self._obey(self._coordinator.tick(self.now_s))

    def _obey(self, orders: CoordinatorOrders) -> None:
        for order in orders:
            if isinstance(order, SendOrder):
                if (worker := self._workers.get(order.uid)) is not None:
                    self.after(self.times.message_s, worker.hear, order.message)
            elif isinstance(order, StartOrder):
                for _ in range(self._per_machine):
                    self._starts(order.machine)
            elif isinstance(order, EndOrder):
                self._is_over = True
                self._played.end, self._played.is_lost = order.reason, order.code != 0
        due_s = self._coordinator.deadline_s
        if due_s is not None and due_s != self._ticks_s:
            self._ticks_s = due_s
            self.after(max(due_s - self.now_s, 0.0), self._tick, due_s)
