"""Takes in what happens to the machines and workers of an elastic job, and says what is to be done about it.

It is a state machine without a socket, a process or a clock: events come in as calls with the time at which they were
heard of, orders come out. Events change facts (`roster.py`, `views.py`); what follows from the facts is decided in one
place (`decisions.py`), so that it does not matter in which order the reports of different workers arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.decisions import Decisions
from paceline.elastic.messages import Broken, Finished, FromWorker, Installed, Leaving, Ready
from paceline.elastic.orders import Orders
from paceline.elastic.policy import Policy
from paceline.elastic.roster import Machine, Place, Worker


class Coordinator:
    """The workers of an elastic job. `tick` must be called at `deadline_s` if nothing else happens before.

    Every method returns what is to be done now, in this order. Names of machines and workers are unique in the job for
    ever: a worker that replaces another has a name of its own, and so has a launcher that was started again.
    """

    def __init__(self, policy: Policy, now_s: float, term: int = 1) -> None:
        """Makes the coordinator of a job that begins now.

        Args:
            policy: the settings.
            now_s: the time.
            term: a number larger than that of any coordinator of this job before.
        """
        self._decisions = Decisions(policy, now_s, term)
        self._roster = self._decisions.roster

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called; None while nothing is waited for, and after the end."""
        return self._decisions.deadline_s

    def machine_joined(self, machine: str, host: str, slots: int, now_s: float) -> Orders:
        """Adds a machine that keeps `slots` workers running once it is told to Begin, or one that comes back.

        The launcher goes on by reporting, for each of its workers that runs, that it started and what its Standing
        holds, and then calls `machine_listed`.
        """
        if (over := self._decisions.over) is not None:
            return [over]
        found = self._roster.machines.setdefault(machine, Machine(machine, host, slots))
        found.slots, found.is_reachable, found.named = slots, True, set()
        return []

    def machine_listed(self, machine: str, now_s: float) -> Orders:
        """Takes the workers of the machine that it has not named since it joined for dead."""
        found = self._roster.machines.get(machine)
        if found is None or found.named is None:
            return []
        for worker in self._roster.workers.values():
            if worker.machine is found and worker.lives and worker.uid not in found.named:
                worker.ended, worker.was_drained = "while its machine was out of reach", False
        found.named = None
        return self._decisions.settle(now_s)

    def machine_lost(self, machine: str, why: str, now_s: float) -> Orders:
        """Notes that the machine cannot be reached. Its workers may live, and may train with others."""
        found = self._roster.machines.get(machine)
        if found is None or not found.is_reachable:
            return []
        found.is_reachable = False
        self._decisions.say(f"{found.host} cannot be reached: {why}")
        return self._decisions.settle(now_s)

    def machine_left(self, machine: str, why: str, now_s: float) -> Orders:
        """Removes a machine whose launcher has ended its workers, and goes."""
        found = self._roster.machines.get(machine)
        if found is None:
            return []
        found.slots, found.has_begun, found.replaces = 0, False, False
        for worker in self._roster.workers.values():
            if worker.machine is found and worker.lives:
                worker.ended, worker.was_drained = f"its machine left: {why}", False
        self._decisions.say(f"{found.host} left: {why}")
        return self._decisions.settle(now_s)

    def slots_changed(self, machine: str, slots: int, now_s: float) -> Orders:
        """Notes how many workers the machine keeps running from now on; fewer, because one failed again and again."""
        found = self._roster.machines.get(machine)
        if found is None:
            return []
        found.slots = slots
        return self._decisions.settle(now_s)

    def worker_started(self, uid: str, machine: str, now_s: float, said: Sequence[FromWorker] = ()) -> Orders:
        """Notes that a worker runs, or that one that is known still does.

        Args:
            uid: the worker's name.
            machine: its machine's.
            now_s: the time.
            said: after the machine was out of reach, what the worker's Standing holds.
        """
        found = self._roster.machines.get(machine)
        if found is None or self._decisions.over is not None:
            return []
        if found.named is not None:
            found.named.add(uid)
        is_known = uid in self._roster.workers
        worker = self._roster.workers.setdefault(uid, Worker(uid, found))
        worker.stalled = None
        if is_known:
            self._decisions.remind(worker)
        self._heard_again(worker, said, is_known, now_s)
        return self._decisions.settle(now_s)

    def worker_stalled(self, uid: str, why: str, now_s: float) -> Orders:
        """Notes that a worker does nothing; all that it sent before has been reported.

        It is left out while others can go on. When it answers again, its launcher reports that it started.
        """
        worker = self._roster.workers.get(uid)
        if worker is None or not worker.lives:
            return []
        if worker.stalled is None:
            worker.stalled = why
            self._decisions.say(worker.absence)
        return self._decisions.settle(now_s)

    def worker_ended(self, uid: str, how: str, exit_code: int, now_s: float) -> Orders:
        """Notes that a worker has ended; all that it sent has been reported before."""
        worker = self._roster.workers.get(uid)
        if worker is None or not worker.lives:
            return []
        worker.ended, worker.exit_code = how, exit_code
        return self._decisions.settle(now_s)

    def worker_said(self, uid: str, message: FromWorker, now_s: float) -> Orders:
        """Takes a worker's message; each worker's messages come in the order in which it sent them."""
        worker = self._roster.workers.get(uid)
        if worker is None or not worker.lives or worker.place is Place.DISMISSED:
            return []
        worker.stalled = None
        self._hear(worker, message, now_s)
        return self._decisions.settle(now_s)

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        return self._decisions.settle(now_s)

    def _hear(self, worker: Worker, message: FromWorker, now_s: float) -> None:
        match message:
            case Ready():
                self._decisions.asked(worker, message.fingerprint, now_s)
            case Installed():
                self._decisions.entered(worker, message)
            case Broken():
                self._decisions.broke(worker, message, now_s)
            case Leaving():
                self._decisions.leaves(worker, message.reason)
            case Finished():
                worker.has_finished = True

    def _heard_again(self, worker: Worker, said: Sequence[FromWorker], is_known: bool, now_s: float) -> None:
        """Takes what a worker said while its machine was out of reach, perhaps together with what is known."""
        is_in = any(isinstance(each, Installed) for each in said)
        was_left_out = worker.place is Place.OUTSIDE and worker.fingerprint
        for message in said:
            if isinstance(message, Ready) and is_known and (is_in or was_left_out):
                continue  # an old one: a worker that is told again that it is left out asks again
            self._hear(worker, message, now_s)
