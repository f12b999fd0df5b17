"""How an elastic job ends."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.elastic.orders import End
from paceline.elastic.roster import Place, Worker
from paceline.elastic.views import Views


def waits_for(workers: list[Worker], views: Views) -> list[Worker]:
    """Returns who has to end before the job does, once a member has finished.

    These are the workers that have finished, whose script may go on after its loop, and those that were with one of
    them in its last view: they have the final state, since it could not have finished without them.
    """
    with_them = {uid for each in workers if each.has_finished for uid in views.members_of(each.installed)}
    return [
        each
        for each in workers
        if each.lives and (each.has_finished or (each.uid in with_them and each.place is Place.MEMBER))
    ]


def exit_of(workers: Iterable[Worker]) -> End:
    """Returns how the job ends, after all that have finished have ended.

    A worker that was killed after its loop is no harm as long as another came to its end: all have the same state.
    """
    finished = [each for each in workers if each.has_finished]
    for each in finished:
        if each.exit_code > 0:
            return End(each.exit_code, f"After its last round, {each.absence}.")
    if all(not each.lives and each.exit_code < 0 for each in finished):
        return End(1, f"After the last round, {finished[0].absence}, and no other worker came to its end.")
    return End(0)


def lost_state(views: Views) -> str:
    """Returns the sentence for a job whose state is gone."""
    ends = "; ".join(each.absence for each in views.concerned() if not each.is_here)
    return f"The job's state is lost, since every worker that held it is gone: {ends}. Start again from a checkpoint."
