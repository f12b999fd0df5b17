"""What the messages of workers mean for an elastic job."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.breaks import Break
from paceline.elastic.job import Job
from paceline.elastic.lessons import donated, go_on, is_asked_again, learned
from paceline.elastic.messages import Broken, Donating, Finished, FromWorker, Installed, Learned, Leaving, Ready
from paceline.elastic.roster import Place, Worker
from paceline.elastic.starting import refuse


def hear(job: Job, worker: Worker, message: FromWorker, now_s: float) -> None:
    """Notes what a worker's message says."""
    match message:
        case Ready():
            _asked(job, worker, message, now_s)
        case Donating():
            donated(job, worker, message)
        case Learned():
            learned(job, worker, now_s)
        case Installed():
            job.breaks.went_on(message.round)
            job.views.entered(worker, message.generation)
        case Broken():
            _broke(job, worker, message, now_s)
        case Leaving():
            worker.leaving = worker.leaving or message.reason
            if worker.place is not Place.MEMBER:
                job.dismiss(worker, f"asked to end: {message.reason}")
        case Finished():
            if not worker.has_finished:
                worker.has_finished = True
                job.finished.append(worker)


def _asked(job: Job, worker: Worker, message: Ready, now_s: float) -> None:
    """Lets a worker wait for a view; one that was a member says by this that it has no state any more."""
    if worker.place is Place.MEMBER and worker.has_state:
        worker.place, worker.has_state = Place.OUTSIDE, False
    fingerprint = message.fingerprint
    is_asked_again(job, worker, message)
    if worker.place is not Place.OUTSIDE:
        return
    worker.fingerprint = fingerprint
    if worker.leaving is not None or job.ending_s is not None:
        job.dismiss(worker, f"asked to end: {worker.leaving}" if worker.leaving else "the job is done")
    elif job.fingerprint is not None and job.fingerprint != fingerprint:
        refuse(job, worker, job.fingerprint)
    else:
        worker.place, worker.ready_s = Place.READY, now_s
        go_on(job, worker)


def _broke(job: Job, worker: Worker, message: Broken, now_s: float) -> None:
    """Notes that a worker's connections broke, if it has not been told a view since that helps it."""
    views, breaks = job.views, job.breaks
    breaks.went_on(message.round)
    generation = message.generation
    if worker.place is not Place.MEMBER or views.base is None or generation < max(views.base.generation, worker.since):
        return
    if not worker.has_state and worker not in views.base_team:
        if message.round < 0:
            worker.place = Place.READY
            return
        worker.has_state = True  # it has learned the state, or was given it before it lost the others
    report = Break(generation, now_s + job.policy.break_patience_s)
    breaks.reported(worker.uid, report, message.reason)


def hear_again(job: Job, worker: Worker, said: Sequence[FromWorker], is_known: bool, now_s: float) -> None:
    """Takes what a worker said while its machine was out of reach, perhaps together with what is known."""
    is_in = any(isinstance(each, Installed) for each in said)
    for message in said:
        if isinstance(message, Ready) and is_known and is_in:
            continue  # it is known, and does not mean that the worker has no state any more
        hear(job, worker, message, now_s)
