"""Forced views: when the members of a view cannot go on together, and who goes on instead."""

from __future__ import annotations

from paceline.elastic.job import Job
from paceline.elastic.messages import Wait
from paceline.elastic.orders import End, Fence
from paceline.elastic.roster import Place, Worker


def why_forced(job: Job, now_s: float) -> str | None:
    """Returns why a forced view is needed, or None."""
    views = job.views
    if views.must_meet:
        return "not all members had entered the last view when its coordinator was lost"
    for each in views.base_team:
        if _may_come_back(job, each, now_s):
            continue
        if not each.trains and not each.has_finished and not (each.has_left_well and each not in views.team):
            return each.absence
    gone = [each for each in views.newcomers if not each.trains and not _may_come_back(job, each, now_s)]
    if job.ending_s is None and gone:
        return gone[0].absence
    if views.latest is not None and not views.latest.is_planned:
        for each in views.team:
            if each.has_finished and each.installed < views.latest.generation:
                return f"worker {each.uid} has finished"
    for uid, report in job.breaks.waiting.items():
        if now_s >= report.due_s or views.is_explained(report.generation):
            return f"worker {uid} reports: {job.breaks.reasons.get(uid, 'its connections broke')}"
        job.due_s.append(report.due_s)
    return None


def _may_come_back(job: Job, worker: Worker, now_s: float) -> bool:
    """Returns whether a worker's machine is only out of this launcher's reach, since it has not been so for long.

    The worker may train on meanwhile. If it does not, those that are connected to it report that soon.
    """
    if not worker.lives or worker.machine.is_reachable or job.breaks.waiting:
        return False
    until_s = worker.machine.lost_s + job.policy.return_patience_s
    if now_s >= until_s:
        return False
    job.due_s.append(until_s)
    return True


def lacks_quorum(job: Job, now_s: float) -> bool:
    """Waits for those without whom the latest view, which was not told yet, must not be; returns whether it does."""
    if job.withheld is None or job.ending_s is not None or job.views.is_allowed():
        return False
    job.lacks_quorum = True
    away = [each for each in job.views.undecided() if not each.is_here]
    _must_end(job, away, "the others are too few to go on without them", now_s)
    return True


def force(job: Job, why: str, now_s: float) -> bool:
    """Gives a forced view, or says what it has to wait for; returns whether it did anything but wait.

    After the last round no quorum is needed: nobody commits anything any more.
    """
    sources = job.views.sources()
    if not sources:
        return job.ending_s is None and _nobody_left(job, now_s)
    if job.ending_s is None and not job.views.is_allowed():
        away = [each for each in job.views.concerned if each.may_return]
        job.lacks_quorum = True
        return _must_end(job, away, "the others are too few to go on without them", now_s)
    if all(each.trains for each in job.views.concerned) and job.breaks.are_too_many(job.policy, now_s):
        reasons = "; ".join(f"worker {uid}: {reason}" for uid, reason in job.breaks.reasons.items())
        again = f"The workers' connections broke more than {job.policy.most_breaks} times without a round between"
        job.end(End(1, f"{again}, though all workers live. They report: {reasons}"))
        return True
    job.held = None
    job.say(f"{len(sources)} workers go on: {why}" if len(sources) > 1 else f"1 worker goes on: {why}")
    job.give([each for each in sources if each.leaving is None] or sources, is_planned=False)
    return True


def fence(job: Job) -> None:
    """Has those killed that are stopped and hold nothing that anybody needs: no view that counts contains them."""
    if job.withheld is not None or job.over is not None:
        return  # a coordinator that does not know of the latest view may yet need them
    for worker in job.roster.workers.values():
        is_needless = worker.place is not Place.MEMBER and not worker.has_finished
        if worker.is_stopped and is_needless and not worker.is_fenced:
            worker.is_fenced = True
            job.orders.append(Fence(worker.machine.name, worker.uid))


def _nobody_left(job: Job, now_s: float) -> bool:
    """Looks for somebody who holds the state, or may: else the job begins again, or ends.

    Whoever is only stopped has lost nothing, and is waited for until it is continued or ends.
    """
    members = job.views.concerned
    if stopped := [each for each in members if each.may_return and each.is_stopped]:
        job.lacks_quorum = not job.views.is_allowed()
        _tell_whom_it_waits_for(
            job, stopped, "it is stopped, and nobody else holds the job's state; send it SIGCONT", now_s
        )
        return False
    if away := [each for each in members if each.may_return]:
        job.lacks_quorum = not job.views.is_allowed()
        return _must_end(job, away, "nobody else holds the job's state", now_s)
    unsure = [each for each in job.views.newcomers if each.trains]
    if unsure and _wait_for(job, unsure, "they may hold the job's state", now_s, job.policy.hope_s):
        return False
    if not job.views.may_have_begun():
        job.say("all workers ended before the first round; the job begins again")
        job.views.forget()
        job.breaks.answered()
        job.fingerprint = job.held = None
        return True
    ends = "; ".join(each.absence for each in members if not each.is_here)
    gone = f"The job's state is lost, since every worker that held it is gone: {ends}."
    job.end(End(1, f"{gone} Start again from a checkpoint."))
    return True


def _must_end(job: Job, missing: list[Worker], why: str, now_s: float) -> bool:
    """Waits for workers without whom the job cannot go on; ends it when they do not come back."""
    timeout_s = job.policy.quorum_timeout_s
    if _wait_for(job, missing, why, now_s, timeout_s):
        return False
    absences = "; ".join(each.absence for each in missing)
    job.end(End(1, f"Waited {timeout_s:.0f} s, because {why}: {absences}."))
    return True


def _wait_for(job: Job, missing: list[Worker], why: str, now_s: float, timeout_s: float) -> bool:
    """Says for whom the job waits, once; returns False when it has waited long enough."""
    _tell_whom_it_waits_for(job, missing, why, now_s)
    job.due_s.append(job.held_s + timeout_s)
    return now_s < job.held_s + timeout_s


def _tell_whom_it_waits_for(job: Job, missing: list[Worker], why: str, now_s: float) -> None:
    text = f"waiting for {', '.join(each.uid for each in missing)}: {why}"
    if job.held is None:
        job.held_s = now_s
    if job.held != text:
        job.held = text
        job.say(text)
        for worker in job.views.concerned:
            if worker.trains:
                job.tell(worker, Wait(text))
