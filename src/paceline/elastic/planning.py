"""Planned views: workers come and go without anybody being disturbed."""

from __future__ import annotations

from paceline.elastic.job import Job
from paceline.elastic.lessons import may_come
from paceline.elastic.messages import View
from paceline.elastic.orders import End
from paceline.elastic.roster import Worker


def grow(job: Job, now_s: float) -> bool:
    """Lets workers in and out once everybody has entered the latest view; returns whether it did.

    Those who were asked to end stay until somebody else holds the state.
    """
    views = job.views
    if views.latest is None or not views.is_complete or job.breaks.waiting:
        return False
    if any(each.lives and not each.machine.is_reachable for each in views.team):
        return False  # they are to come back first, or to be left out
    leavers = [each for each in views.team if each.leaving is not None]
    ready = may_come(job)
    if _are_too_few(job, views.latest, now_s):
        return True
    moves = job.must_move and views.latest.store != views.store
    if not leavers and not ready and not moves:
        return False
    if not ready and len(leavers) == len(views.team):
        return _dismiss_last(job, leavers, now_s)
    is_urgent = leavers or moves or any(each.has_learned for each in ready)
    due_s = now_s if is_urgent else ready[0].ready_s + job.policy.gather_s
    if now_s < due_s:
        job.due_s.append(due_s)
        return False
    if not views.is_allowed():
        return False
    staying = [each for each in views.team if each.leaving is None] or views.team
    job.give([*staying, *ready], is_planned=True)
    return True


def _dismiss_last(job: Job, leavers: list[Worker], now_s: float) -> bool:
    """Lets the last members go; if others are about to come, not before they were given some time."""
    if job.leaving_s is None:
        job.leaving_s = now_s
    due_s = job.leaving_s + job.policy.start_patience_s
    if job.roster.can_grow() and now_s < due_s:
        job.due_s.append(due_s)
        return False
    for worker in leavers:
        job.dismiss(worker, f"asked to end: {worker.leaving}")
    return True


def _are_too_few(job: Job, latest: View, now_s: float) -> bool:
    """Says that workers are missing; returns True, after ending the job, when they have been for too long."""
    if not latest.must_wait:
        job.few_s = None
        return False
    few = f"{len(latest.members)} of at least {job.policy.min_workers} workers are left"
    if job.few_s is None:
        job.few_s = now_s
        job.say(f"{few}; waiting for more")
    until_s = job.few_s + job.policy.join_timeout_s
    job.due_s.append(until_s)
    if not job.can_grow():
        job.end(End(1, f"{few}, and no other will be started; look at the output of those that ended."))
    elif now_s >= until_s:
        job.end(End(1, f"{few}, and waited {now_s - job.few_s:.0f} s for others; look at the machines' output."))
    return job.over is not None
