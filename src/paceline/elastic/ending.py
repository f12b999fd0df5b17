"""How an elastic job ends."""

from __future__ import annotations

from paceline.elastic.job import Job
from paceline.elastic.orders import End, StopReplacing
from paceline.elastic.roster import Place, Worker


def finish(job: Job, now_s: float) -> None:
    """Ends the job when a worker has finished, and all others of which that is expected."""
    finished = job.finished
    if not finished:
        return
    if job.ending_s is None:
        job.ending_s = now_s
        for machine in job.roster.machines.values():
            machine.replaces = False
            job.orders.append(StopReplacing(machine.name, "the job is done"))
    missing = _waits_for(job, finished)
    for each in job.roster.workers.values():
        if each.lives and each.place in (Place.READY, Place.MEMBER) and each not in missing:
            job.dismiss(each, "the job is done")
    if any(each.is_here for each in missing):
        return
    is_safe = any(not each.lives and each.exit_code == 0 for each in finished)
    until_s = job.ending_s + (job.policy.hope_s if is_safe else job.policy.quorum_timeout_s)
    if missing and now_s < until_s:
        job.due_s.append(until_s)
    else:
        job.end(_exit_of(finished))


def _waits_for(job: Job, finished: list[Worker]) -> list[Worker]:
    """Returns who has to end before the job does, once a member has finished.

    These are the workers that have finished, whose script may go on after its loop, and those that were with one of
    them in its last view: they have the final state, since it could not have finished without them.
    """
    with_them = {uid for each in finished for uid in job.views.members_of(each.installed)}
    members = [each for each in job.roster.workers.values() if each.place is Place.MEMBER and each.uid in with_them]
    return [each for each in {id(each): each for each in [*finished, *members]}.values() if each.lives]


def _exit_of(finished: list[Worker]) -> End:
    """Returns how the job ends, after all that have finished have ended.

    A worker that was killed after its loop is no harm as long as another came to its end: all have the same state.
    """
    for each in finished:
        if each.exit_code > 0:
            return End(each.exit_code, f"After its last round, {each.absence}.")
    if all(not each.lives and each.exit_code < 0 for each in finished):
        return End(1, f"After the last round, {finished[0].absence}, and no other worker came to its end.")
    return End(0)


def has_closed(job: Job) -> bool:
    """Returns whether all members were asked to leave and dismissed, and ends the job after the last of them."""
    members = job.views.concerned
    if not members or any(each.place is not Place.DISMISSED for each in members):
        return False
    if not any(each.is_here for each in members):
        job.end(End(1, "All workers were asked to leave before the last round, and nobody was left to hand over to."))
    return True
