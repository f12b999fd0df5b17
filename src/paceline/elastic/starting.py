"""How an elastic job begins: its machines, and its first view."""

from __future__ import annotations

from collections import Counter

from paceline.elastic.job import Job
from paceline.elastic.orders import Begin, End, StopReplacing
from paceline.elastic.roster import Worker


def begin_machines(job: Job) -> None:
    """Lets machines start their workers, as many as have a place."""
    for machine in job.roster.machines.values():
        waits = not machine.has_begun and machine.named is None and machine.is_reachable and machine.slots
        if waits and job.ending_s is None and job.roster.begun() < job.policy.max_machines:
            machine.has_begun = True
            job.orders.append(Begin(machine.name))


def give_first(job: Job, now_s: float) -> bool:
    """Gives the first view once enough workers are ready; returns whether it did anything.

    When all that the machines keep running are ready, nobody else is waited for.
    """
    policy, ready = job.policy, job.roster.ready()
    if len(ready) >= policy.min_workers:
        is_complete = len(ready) >= job.roster.expected()
        until_s = max(job.quiet_until_s, 0.0 if is_complete else ready[0].ready_s + policy.start_patience_s)
        if now_s >= until_s:
            _start(job, ready)
            return True
        job.due_s.append(until_s)
        return False
    until_s = job.began_s + policy.join_timeout_s
    job.due_s.append(until_s)
    there = f"{len(ready)} of at least {policy.min_workers} workers are ready"
    if now_s >= until_s:
        job.end(End(1, f"{there} after {policy.join_timeout_s:.0f} s; look at the output of the others"))
    elif job.roster.machines and not job.can_grow():
        job.end(End(1, f"{there}, and no other will be started; look at the output of those that ended"))
    return job.over is not None


def _start(job: Job, ready: list[Worker]) -> None:
    counts = Counter(each.fingerprint for each in ready)
    fingerprint = max(counts, key=lambda each: counts[each])  # of two that are as frequent, the one that came first
    for worker in ready:
        if worker.fingerprint != fingerprint:
            refuse(job, worker, fingerprint)
    chosen = [each for each in ready if each.fingerprint == fingerprint]
    if len(chosen) >= job.policy.min_workers:
        job.fingerprint = fingerprint
        job.give(chosen, is_planned=False)


def refuse(job: Job, worker: Worker, expected: str) -> None:
    """Turns away a worker whose results would have other bits; its machine would start others like it."""
    host = worker.machine.host
    reason = f"worker {worker.uid} on {host} has {worker.fingerprint!r}, and the job's members have {expected!r}"
    reason = f"{reason}: their results would differ in bits"
    job.say(reason)
    job.dismiss(worker, f"{reason}. Use machines and settings that are alike", 2)
    if worker.machine.replaces:
        worker.machine.replaces = False
        job.orders.append(StopReplacing(worker.machine.name, reason))
