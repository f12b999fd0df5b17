"""What it means for an elastic job that machines come, name their workers, are lost and leave."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.hearing import hear_again
from paceline.elastic.job import Job
from paceline.elastic.messages import Dismissed, FromWorker
from paceline.elastic.orders import Tell
from paceline.elastic.roster import Machine, Worker
from paceline.elastic.starting import begin_machines


def came(job: Job, machine: str, host: str, slots: int, address: str, store: str) -> None:
    """Adds a machine, or one that comes back."""
    found = job.roster.machines.setdefault(machine, Machine(machine, host, slots))
    found.slots, found.is_reachable, found.named = slots, True, set()
    found.address, found.store = address or found.address, store or found.store
    found.replaces, found.has_left, found.has_said_so = found.replaces or found.has_left, False, False


def runs(job: Job, found: Machine, uid: str, said: Sequence[FromWorker], now_s: float) -> None:
    """Adds a worker that runs, or takes in what one has said while its machine was out of reach."""
    if found.named is not None:
        found.named.add(uid)
    is_known = uid in job.roster.workers
    worker = job.roster.workers.setdefault(uid, Worker(uid, found))
    if not worker.lives:  # its machine was taken for dead, wrongly, and the others have gone on without it
        job.orders.append(Tell(found.name, uid, Dismissed("the others have gone on without it")))
        return
    worker.runs()
    if is_known:
        job.remind(worker)
    hear_again(job, worker, said, is_known, now_s)


def was_listed(job: Job, found: Machine) -> None:
    """Takes the workers for dead that a machine has not named since it came."""
    for worker in job.roster.workers.values():
        if worker.machine is found and worker.lives and worker.uid not in (found.named or ()):
            worker.ended, worker.was_drained = "while its machine was out of reach", False
    found.named = None
    begin_machines(job)


def is_away(job: Job, found: Machine, why: str, since_s: float) -> None:
    """Notes that a machine cannot be reached."""
    found.is_reachable, found.lost_s = False, since_s
    job.say(f"{found.host} cannot be reached: {why}")
    begin_machines(job)


def has_gone(job: Job, found: Machine, why: str, *, has_said_so: bool) -> None:
    """Removes a machine, and its workers with it."""
    found.slots, found.has_begun, found.replaces = 0, False, False
    found.has_left, found.has_said_so = True, has_said_so
    for worker in job.roster.workers.values():
        if worker.machine is found and worker.lives:
            worker.ended, worker.was_drained = f"its machine left: {why}", False
    job.say(f"{found.host} left: {why}")
    begin_machines(job)
