"""Lessons: how a worker that comes late learns the state while the others train, before it is in any view.

A lesson has a number, which is larger than that of any view before, and donors. All members are told of it, and the
donors among them take a snapshot at the beginning of the batch after all have heard of it, so that all have the same.
What a learner makes of it is its own affair: it says when it has caught up, or asks again when all its donors are gone.
"""

from __future__ import annotations

from paceline.elastic.job import Job
from paceline.elastic.messages import Donating, Learn, Lesson, Ready
from paceline.elastic.roster import Place, Worker

DONORS = 2  # of a lesson
_REMEMBERED = 16  # lessons


def teach(job: Job) -> None:
    """Begins the lessons of those who are ready to learn, when all members train."""
    views = job.views
    if views.latest is None or views.latest.must_wait:
        return
    for learner in job.roster.ready():
        if learner.learns and not learner.has_learned and not _may_be_given(job, learner):
            _begin(job, learner)


def may_come(job: Job) -> list[Worker]:
    """Returns those who may come in by a planned view.

    A learner that has not caught up may if nobody trains meanwhile, since the members wait for more, or all leave.
    """
    views = job.views
    is_idle = views.latest is not None and views.latest.must_wait
    is_idle = is_idle or all(each.leaving is not None for each in views.team)
    return [each for each in job.roster.ready() if is_idle or each.has_learned or not each.learns]


def donated(job: Job, donor: Worker, message: Donating) -> None:
    """Tells the learner of a donor; if none can, the others will have to wait while it gets the state."""
    said = job.donations.setdefault(message.lesson, {})
    said[donor.uid] = message
    while len(job.donations) > _REMEMBERED:
        del job.donations[min(job.donations)]
    for learner in job.roster.ready():
        if learner.lesson is not None and learner.lesson.number == message.lesson:
            _offer(job, learner, learner.lesson, donor.uid, message)


def learned(job: Job, worker: Worker, now_s: float) -> None:
    """Lets a learner that has caught up come in, also one that a view left out, and that has gone on learning since."""
    worker.has_learned = worker.learns
    if worker.place is Place.OUTSIDE and worker.learns:
        if worker.leaving is not None or job.ending_s is not None:
            job.dismiss(worker, f"asked to end: {worker.leaving}" if worker.leaving else "the job is done")
        else:
            worker.place, worker.ready_s = Place.READY, now_s


def is_asked_again(job: Job, worker: Worker, message: Ready) -> None:
    """Forgets the lesson of a worker that asks to take part, unless it has only said again what it said before.

    A lesson that another coordinator has begun goes on.
    """
    if worker.place not in (Place.OUTSIDE, Place.READY):
        return
    worker.learns = message.learns
    known = job.lessons.pop(worker.uid, worker.lesson)
    if known is None or message.after >= known.number:
        worker.has_learned, worker.lesson = False, None
    elif worker.lesson is None:
        worker.lesson = known


def go_on(job: Job, learner: Worker) -> None:
    """Tells a learner of the donors that were heard of before itself."""
    if (lesson := learner.lesson) is not None:
        for uid, message in job.donations.get(lesson.number, {}).items():
            _offer(job, learner, lesson, uid, message)


def _offer(job: Job, learner: Worker, lesson: Lesson, donor: str, message: Donating) -> None:
    if message.address:
        offer = Learn(message.lesson, donor, message.round, message.address)
        if offer not in learner.offers:
            learner.offers.append(offer)
            job.tell(learner, offer)
    else:
        learner.refusals.add(donor)
        learner.learns = not learner.refusals.issuperset(lesson.donors)


def _may_be_given(job: Job, learner: Worker) -> bool:
    """Whether the learner has a lesson, which it may complete; when donors have offered it, it knows that itself."""
    if learner.lesson is None:
        return False
    donors = [job.roster.workers.get(uid) for uid in learner.lesson.donors if uid not in learner.refusals]
    return bool(learner.offers) or any(each is not None and each.trains for each in donors)


def _begin(job: Job, learner: Worker) -> None:
    """Chooses donors, those on the learner's own machine first, and tells all members."""
    able = [each for each in job.views.team if each.trains and each.has_state and each.leaving is None]
    able.sort(key=lambda each: (each.machine is not learner.machine, each.uid))
    if not able:
        return
    chosen = able[:DONORS]
    lesson = Lesson(job.views.next_number(), learner.uid, tuple(each.uid for each in chosen))
    learner.lesson, learner.refusals, learner.offers = lesson, set(), []
    for member in job.views.team:
        job.tell(member, lesson)
