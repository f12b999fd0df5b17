"""How a job passes from one coordinator to another: what is told beforehand, and what is made of it."""

from __future__ import annotations

from paceline.elastic.job import Job
from paceline.elastic.knowledge import Knowledge, Peer, machine_of
from paceline.elastic.orders import Know, Orders
from paceline.elastic.roster import Machine, Worker


def inform(job: Job, home: int) -> Orders:
    """Returns the orders that let every machine know what a coordinator after this one has to know.

    Before the first view there is nothing that could be lost.
    """
    if not job.views.since_complete or job.over is not None:
        return []
    knowledge = _knowledge(job, home)
    orders: Orders = []
    for machine in job.roster.machines.values():
        if machine.is_reachable and machine.told != knowledge:
            machine.told = knowledge
            orders.append(Know(machine.name, knowledge))
    return orders


def _knowledge(job: Job, home: int) -> Knowledge:
    views, workers = job.views, job.roster.workers
    members = {uid for view in views.since_complete for uid in view.members}
    machines = sorted(job.roster.machines.values(), key=lambda each: int(each.name))
    return Knowledge(
        term=views.term,
        coordinator=home,
        fingerprint=job.fingerprint or "",
        complete=views.completed,
        views=tuple(views.since_complete),
        dead=tuple(sorted(uid for uid in members if not workers[uid].lives)),
        ended=tuple(int(each.name) for each in machines if each.has_left and each.has_said_so),
        peers=tuple(Peer(int(each.name), each.host, each.address) for each in machines if not each.has_left),
        lessons=tuple(job.open_lessons()),
        job=job.identity,
    )


def resume(job: Job, known: Knowledge, now_s: float) -> None:
    """Puts the job into the state that is known; the machines are yet to come back."""
    job.fingerprint, job.identity = known.fingerprint or None, known.job
    lost_s = now_s - job.policy.return_patience_s + job.policy.follow_patience_s
    for peer in known.peers:
        name = str(peer.number)
        job.roster.machines[name] = _absent(name, peer.host, lost_s, peer.address)
    for uid in known.members:
        name = str(machine_of(uid))
        machine = job.roster.machines.setdefault(name, _absent(name, f"machine {name}", lost_s))
        worker = job.roster.workers[uid] = Worker(uid, machine)
        if known.is_dead(uid):
            worker.ended = "with its launcher" if machine_of(uid) in known.ended else "before"
    for number in known.ended:
        name = str(number)
        found = job.roster.machines.setdefault(name, _absent(name, f"machine {name}", lost_s))
        found.replaces, found.has_left, found.has_said_so = False, True, True
    job.views.resume(known.views, known.complete)
    job.lessons = {each.learner: each for each in known.lessons if not known.is_dead(each.learner)}


def succession(known: Knowledge, home: int) -> str:
    """Returns a sentence on who coordinates, and what became of the one before."""
    if known.coordinator == home:
        return f"machine {home} coordinates again"
    state = "is gone" if known.coordinator in known.ended else "cannot be reached"
    return f"machine {known.coordinator}, which coordinated, {state}; machine {home} coordinates from now on"


def _absent(name: str, host: str, lost_s: float, address: str = "") -> Machine:
    return Machine(name, host, 0, is_reachable=False, has_begun=True, lost_s=lost_s, address=address)
