"""An elastic job with failures, in virtual time: the coordinator is the one that a launcher runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from paceline.elastic.coordinator import Coordinator
from paceline.elastic.messages import FromWorker, View
from paceline.elastic.orders import Begin, End, Orders, Tell
from paceline.elastic.policy import Policy
from paceline.plan.survival.timings import Failures, Timings
from paceline.plan.survival.workers import Group, Worker

_MOST_EVENTS = 5_000_000
_NEVER_S = 1e12
_CALM_S = 90.0  # in which all workers start, before anything fails


@dataclass
class Played:
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


class Job:
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
        times: Timings,
        failures: Failures,
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
        self._coordinator = Coordinator(Policy(min_workers=min_workers, start_patience_s=60.0), 0.0)
        self._ticks_s: float | None = None
        self._machines: dict[str, list[Worker]] = {}
        self._workers: dict[str, Worker] = {}
        self._groups: dict[int, Group] = {}
        self._names = 0
        self.learners = 0
        self.steps = 0
        self.left_s = times.step_s  # of the step that is being computed
        self._began_s: float | None = None
        self._committed_s = 0.0
        self._hurt = 0  # failures since the last step
        self._played = Played()
        self._is_over = False
        for _ in range(machines):
            self._joins()

    def play(self, failures: int) -> Played:
        """Plays until so many failures have happened and are over, or the job ends."""
        self.after(_CALM_S + self._next_failure_s(), self._fails, failures)
        self._run(lambda: self._is_over)
        return self._result()

    def part(self, machines: int) -> Played:
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

    def _result(self) -> Played:
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

    def says(self, worker: Worker, message: FromWorker) -> None:
        """A worker speaks to the coordinator."""
        self.after(self.times.message_s, self._hears, worker.uid, message)

    def group(self, view: View) -> Group:
        """Returns the connections of a view."""
        found = self._groups.get(view.generation)
        if found is None:
            found = self._groups[view.generation] = Group(self, view)
            for old in [number for number in self._groups if number < view.generation and self._groups[number].is_over]:
                del self._groups[old]
        return found

    def slowness_of(self, members: int) -> float:
        """Returns how many times as long a step takes with so many members, to whom all the work is dealt out."""
        missing = min(0.99, (self._workers_in_all - members) * self._share)
        return (self.times.slowness if self.learners else 1.0) / (1 - missing)

    def keep(self, group: Group, lost: int) -> None:
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

    def ends(self, worker: Worker, code: int) -> None:
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
        worker = self._workers[uid] = Worker(self, uid, machine)
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

    def _obey(self, orders: Orders) -> None:
        for order in orders:
            if isinstance(order, Tell):
                if (worker := self._workers.get(order.uid)) is not None:
                    self.after(self.times.message_s, worker.hear, order.message)
            elif isinstance(order, Begin):
                for _ in range(self._per_machine):
                    self._starts(order.machine)
            elif isinstance(order, End):
                self._is_over = True
                self._played.end, self._played.is_lost = order.reason, order.code != 0
        due_s = self._coordinator.deadline_s
        if due_s is not None and due_s != self._ticks_s:
            self._ticks_s = due_s
            self.after(max(due_s - self.now_s, 0.0), self._tick, due_s)
