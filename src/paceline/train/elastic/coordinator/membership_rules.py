"""The coordinator's rules for first, forced and planned views, for state transfers, and for the end of the job.

Each rule is a function that evaluates the job's state and adds orders. `Coordinator._step` applies the rules in the
order given in `coordinator.py`.

A *transfer* sends the state to a worker that joins while the others train. The number of a transfer is larger than the
generation of any earlier view. A transfer is announced to all members. Its senders take a snapshot at the beginning of
the first batch after all members have received the announcement, so all snapshots are equal. The receiver reports when
it has caught up, or repeats its request when all its senders have failed.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from paceline.train.elastic.coordinator.elastic_job import ElasticJob
from paceline.train.elastic.coordinator.worker_registry import WorkerPhase, WorkerRecord
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    EndOrder,
    FenceStalledOrder,
    StartOrder,
    StateTransfer,
    TransferOffer,
    TransferReady,
    View,
    WaitNotice,
    WorkerReady,
)

SENDERS_OF_A_TRANSFER = 2
_REMEMBERED = 16  # number of transfers whose offers are kept
_MOST_DIFFERENCES = 3  # number of differences that a message lists


def finish_job(job: ElasticJob, now_s: float) -> None:
    """Ends the job once a worker has finished and the job need not wait for any other worker."""
    finished = job.finished
    if not finished:
        return
    if job.ending_s is None:
        job.ending_s = now_s
        for machine in job.registry.machines.values():
            machine.replaces = False
            job.orders.append(CloseSlotsOrder(machine.name, "the job has finished"))
    missing = _waits_for(job, finished)
    for worker in job.registry.workers.values():
        if worker.lives and worker.phase in (WorkerPhase.READY, WorkerPhase.MEMBER) and worker not in missing:
            job.dismiss(worker, "the job has finished")
    if any(member.is_here for member in missing):
        return
    is_safe = any(not member.lives and member.exit_code == 0 for member in finished)
    until_s = job.ending_s + (job.policy.hope_s if is_safe else job.policy.quorum_timeout_s)
    if missing and now_s < until_s:
        job.due_s.append(until_s)
    else:
        job.end(_exit_of(finished))


def _waits_for(job: ElasticJob, finished: list[WorkerRecord]) -> list[WorkerRecord]:
    """Once a member has finished, returns the workers that must exit before the job ends.

    These are the finished workers, whose scripts may continue after the loop, and the members of their last views.
    Those members have the final state, because the finished workers could not have completed the last round without
    them.
    """
    with_them = {uid for worker in finished for uid in job.views.members_of(worker.installed)}
    living = [worker for worker in job.registry.workers.values() if worker.lives and worker not in finished]
    members = [worker for worker in living if worker.phase is WorkerPhase.MEMBER and worker.uid in with_them]
    return [*(worker for worker in finished if worker.lives), *members]


def _exit_of(finished: list[WorkerRecord]) -> EndOrder:
    """Returns the order that ends the job once all finished workers have exited.

    If a worker was killed after its loop but another worker completed, the job has succeeded, because all workers have
    the same state.
    """
    for worker in finished:
        if worker.exit_code > 0:
            return EndOrder(worker.exit_code, f"After its last round, {worker.absence}.")
    if all(not member.lives and member.exit_code < 0 for member in finished):
        return EndOrder(1, f"After the last round, {finished[0].absence}, and no other worker finished.")
    return EndOrder(0)


def has_closed(job: ElasticJob) -> bool:
    """Returns True if all members were asked to leave and were dismissed; ends the job when none of them is left."""
    members = job.views.concerned
    if not members or any(worker.phase is not WorkerPhase.DISMISSED for worker in members):
        return False
    if not any(worker.is_here for worker in members):
        left = "All workers were asked to leave before the last round, and no other worker was left to take over."
        job.end(EndOrder(1, left))
    return True


def start_transfers(job: ElasticJob) -> None:
    """Begins transfers to the ready workers that can catch up while the members train."""
    views = job.views
    if views.latest is None or views.latest.must_wait:
        return
    for receiver in job.registry.ready():
        if receiver.can_catch_up and not receiver.has_caught_up and not _may_be_given(job, receiver):
            _begin(job, receiver)


def admissible_workers(job: ElasticJob) -> list[WorkerRecord]:
    """Returns the ready workers that may join in a planned view.

    A receiver that has not caught up may join if training is paused anyway, because the members are waiting for more
    workers or because all of them are leaving.
    """
    views = job.views
    is_idle = views.latest is not None and views.latest.must_wait
    is_idle = is_idle or all(worker.leaving is not None for worker in views.team)
    return [worker for worker in job.registry.ready() if is_idle or worker.has_caught_up or not worker.can_catch_up]


def offer_transfer(job: ElasticJob, sender: WorkerRecord, message: TransferReady) -> None:
    """Passes a sender's offer on to the receiver. If all senders refuse, members pause while the state is sent."""
    job.transfer_offers.setdefault(message.transfer, {})[sender.uid] = message
    while len(job.transfer_offers) > _REMEMBERED:
        del job.transfer_offers[min(job.transfer_offers)]
    for receiver in job.registry.ready():
        if receiver.transfer is not None and receiver.transfer.number == message.transfer:
            _offer(job, receiver, receiver.transfer, sender.uid, message)


def mark_caught_up(job: ElasticJob, worker: WorkerRecord, now_s: float) -> None:
    """Marks a receiver that has caught up as ready, even if a view has excluded it in the meantime."""
    worker.has_caught_up = worker.can_catch_up
    if worker.phase is WorkerPhase.OUTSIDE and worker.can_catch_up and not job.dismiss_needless(worker):
        worker.phase, worker.ready_s = WorkerPhase.READY, now_s


def reset_transfer(job: ElasticJob, worker: WorkerRecord, message: WorkerReady) -> None:
    """Discards the transfer of a worker that requests to join, unless the request merely repeats an earlier one.

    A transfer begun by another coordinator continues.
    """
    if worker.phase not in (WorkerPhase.OUTSIDE, WorkerPhase.READY):
        return
    worker.can_catch_up = message.can_catch_up
    known = job.transfers.pop(worker.uid, worker.transfer)
    if known is None or message.after >= known.number:
        worker.has_caught_up, worker.transfer = False, None
    elif worker.transfer is None:
        worker.transfer = known


def resend_offers(job: ElasticJob, receiver: WorkerRecord) -> None:
    """Sends a receiver the offers that arrived before its own request."""
    if (transfer := receiver.transfer) is not None:
        for uid, message in job.transfer_offers.get(transfer.number, {}).items():
            _offer(job, receiver, transfer, uid, message)


def _offer(
    job: ElasticJob, receiver: WorkerRecord, transfer: StateTransfer, sender: str, message: TransferReady
) -> None:
    if message.address:
        offer = TransferOffer(message.transfer, sender, message.round, message.address)
        if offer not in receiver.offers:
            receiver.offers.append(offer)
            job.send(receiver, offer)
    else:
        receiver.refusals.add(sender)
        receiver.can_catch_up = not receiver.refusals.issuperset(transfer.senders)


def _may_be_given(job: ElasticJob, receiver: WorkerRecord) -> bool:
    """Returns True if the receiver has a transfer that may still complete.

    Once the receiver has an offer, it detects the loss of a sender itself.
    """
    if receiver.transfer is None:
        return False
    senders = [job.registry.workers.get(uid) for uid in receiver.transfer.senders if uid not in receiver.refusals]
    return bool(receiver.offers) or any(worker is not None and worker.trains for worker in senders)


def _begin(job: ElasticJob, receiver: WorkerRecord) -> None:
    """Chooses the senders, preferably on the receiver's own machine, and announces the transfer to all members."""
    able = [worker for worker in job.views.team if worker.trains and worker.has_state and worker.leaving is None]
    able.sort(key=lambda member: (member.machine is not receiver.machine, member.uid))
    if not able:
        return
    chosen = able[:SENDERS_OF_A_TRANSFER]
    transfer = StateTransfer(job.views.next_number(), receiver.uid, tuple(member.uid for member in chosen))
    receiver.transfer, receiver.refusals, receiver.offers = transfer, set(), []
    for member in job.views.team:
        job.send(member, transfer)


def change_membership(job: ElasticJob, now_s: float) -> bool:
    """Adds and removes workers once all members have entered the latest view; returns whether the view changed.

    Workers that were asked to exit remain members until others hold the state.
    """
    views = job.views
    if views.latest is None or not views.is_complete or job.breaks.waiting:
        return False
    if any(worker.lives and not worker.machine.is_reachable for worker in views.team):
        return False  # wait until these members reconnect or are excluded
    leavers = [worker for worker in views.team if worker.leaving is not None]
    ready = admissible_workers(job)
    if _are_too_few(job, views.latest, now_s):
        return True
    moves = job.must_move and views.latest.store != views.store
    if not leavers and not ready and not moves:
        return False
    if not ready and len(leavers) == len(views.team):
        return _dismiss_last(job, leavers, now_s)
    is_urgent = leavers or moves or any(worker.has_caught_up for worker in ready)
    due_s = now_s if is_urgent else ready[0].ready_s + job.policy.gather_s
    if now_s < due_s:
        job.due_s.append(due_s)
        return False
    if not views.is_allowed():
        return False
    staying = [worker for worker in views.team if worker.leaving is None] or views.team
    job.give([*staying, *ready], is_planned=True)
    return True


def _dismiss_last(job: ElasticJob, leavers: list[WorkerRecord], now_s: float) -> bool:
    """Dismisses the last members, but only after a grace period if other workers may still join."""
    if job.leaving_s is None:
        job.leaving_s = now_s
    due_s = job.leaving_s + job.policy.start_patience_s
    if job.registry.can_grow() and now_s < due_s:
        job.due_s.append(due_s)
        return False
    for worker in leavers:
        job.dismiss(worker, f"asked to leave: {worker.leaving}")
    return True


def _are_too_few(job: ElasticJob, latest: View, now_s: float) -> bool:
    """Reports that workers are missing. Ends the job and returns True if they have been missing for too long."""
    if not latest.must_wait:
        job.few_s = None
        return False
    few = f"{len(latest.members)} of at least {job.policy.min_workers} workers are left"
    if job.few_s is None:
        job.few_s = now_s
        job.notify(f"{few}; waiting for more")
    until_s = job.few_s + job.policy.join_timeout_s
    job.due_s.append(until_s)
    if not job.can_grow():
        job.end(EndOrder(1, f"{few}, and no other will be started; look at the output of those that ended."))
    elif now_s >= until_s:
        job.end(EndOrder(1, f"{few}, and waited {now_s - job.few_s:.0f} s for others; look at the machines' output."))
    return job.over is not None


def begin_machines(job: ElasticJob) -> None:
    """Orders up to `max_machines` machines to start their workers."""
    for machine in job.registry.machines.values():
        waits = not machine.has_begun and machine.listed is None and machine.is_reachable and machine.slots
        if waits and job.ending_s is None and job.registry.begun() < job.policy.max_machines:
            machine.has_begun = True
            job.orders.append(StartOrder(machine.name))


def give_first_view(job: ElasticJob, now_s: float) -> bool:
    """Issues the first view once enough workers are ready; returns whether it was issued or the job has ended.

    If all workers that the machines keep running are ready, `start_patience_s` does not apply.
    """
    policy, ready = job.policy, job.registry.ready()
    if len(ready) >= policy.min_workers:
        is_complete = len(ready) >= job.registry.expected()
        until_s = max(job.quiet_until_s, 0.0 if is_complete else ready[0].ready_s + policy.start_patience_s)
        if now_s >= until_s:
            _start(job, ready)
            return True
        job.due_s.append(until_s)
        return False
    until_s = job.began_s + policy.join_timeout_s
    job.due_s.append(until_s)
    ready_count = f"{len(ready)} of at least {policy.min_workers} workers are ready"
    if now_s >= until_s:
        job.end(EndOrder(1, f"{ready_count} after {policy.join_timeout_s:.0f} s; look at the output of the others"))
    elif job.registry.machines and not job.can_grow():
        job.end(EndOrder(1, f"{ready_count}, and no other will be started; look at the output of those that ended"))
    return job.over is not None


def _start(job: ElasticJob, ready: list[WorkerRecord]) -> None:
    counts = Counter(newcomer.fingerprint for newcomer in ready)
    fingerprint = max(counts, key=lambda text: counts[text])  # in a tie, the fingerprint that was reported first
    for worker in ready:
        if worker.fingerprint != fingerprint:
            refuse_worker(job, worker, fingerprint)
    chosen = [newcomer for newcomer in ready if newcomer.fingerprint == fingerprint]
    if len(chosen) >= job.policy.min_workers:
        job.fingerprint = fingerprint
        job.give(chosen, is_planned=False)


def refuse_worker(job: ElasticJob, worker: WorkerRecord, expected: str) -> None:
    """Dismisses a worker whose results would differ from the others', and stops replacing workers on its machine."""
    host = worker.machine.host
    differences = differences_of(worker.fingerprint, expected)
    reason = f"worker {worker.uid} on {host} would compute other results than the job's members: {differences}"
    job.notify(reason)
    job.dismiss(worker, f"{reason}. Use identical machines, programs and settings", 2)
    if worker.machine.replaces:
        worker.machine.replaces = False
        job.orders.append(CloseSlotsOrder(worker.machine.name, reason))


def differences_of(own: str, expected: str) -> str:
    """Returns text about the differences between a worker's fingerprint and that of the job's members.

    >>> differences_of('{"the seed": "1", "buffer b": "of shape [2]"}', '{"the seed": "2"}')
    'the seed is 1 there, and 2 in the job; buffer b (of shape [2]) exists only there'
    """
    try:
        mine, theirs = (msgspec.json.decode(text, type=dict[str, str]) for text in (own, expected))
    except msgspec.DecodeError:  # a launcher of another version
        return f"{own!r} there, and {expected!r} in the job"
    found = [
        f"{name} is {value} there, and {theirs[name]} in the job"
        for name, value in mine.items()
        if theirs.get(name, value) != value
    ]
    found += [f"{name} ({value}) exists only there" for name, value in mine.items() if name not in theirs]
    found += [f"{name} ({value}) exists only in the job" for name, value in theirs.items() if name not in mine]
    more = len(found) - _MOST_DIFFERENCES
    listed = "; ".join(found[:_MOST_DIFFERENCES]) or "the order of the parameters differs"
    return f"{listed}; and {more} more" if more > 0 else listed


def why_forced(job: ElasticJob, now_s: float) -> str | None:
    """Returns the reason for a forced view, or None."""
    views = job.views
    if views.must_meet:
        return "not all members had entered the last view when its coordinator was lost"
    for worker in views.base_team:
        if _may_return(job, worker, now_s):
            continue
        if not worker.trains and not worker.has_finished and not (worker.has_left_well and worker not in views.team):
            return worker.absence
    gone = [member for member in views.newcomers if not member.trains and not _may_return(job, member, now_s)]
    if job.ending_s is None and gone:
        return gone[0].absence
    if views.latest is not None and not views.latest.is_planned:
        for candidate in views.team:
            if candidate.has_finished and candidate.installed < views.latest.generation:
                return f"worker {candidate.uid} has finished"
    for uid, report in job.breaks.waiting.items():
        if now_s >= report.due_s or views.is_explained(report.generation):
            return f"worker {uid} reports: {job.breaks.reasons.get(uid, 'its connections broke')}"
        job.due_s.append(report.due_s)
    return None


def _may_return(job: ElasticJob, worker: WorkerRecord, now_s: float) -> bool:
    """Returns True if a worker's machine has been unreachable only for a short time.

    The worker may still be training. If it is not, the workers connected to it will soon report broken connections.
    """
    if not worker.lives or worker.machine.is_reachable or job.breaks.waiting:
        return False
    until_s = worker.machine.lost_s + job.policy.return_patience_s
    if now_s >= until_s:
        return False
    job.due_s.append(until_s)
    return True


def lacks_quorum(job: ElasticJob, now_s: float) -> bool:
    """Returns True if the latest view cannot be sent for lack of a quorum; ends the job if this lasts too long."""
    if job.withheld is None or job.ending_s is not None or job.views.is_allowed():
        return False
    job.lacks_quorum = True
    away = [worker for worker in job.views.undecided() if not worker.is_here]
    _must_end(job, away, "the others are too few to continue without them", now_s)
    return True


def force_view(job: ElasticJob, why: str, now_s: float) -> bool:
    """Issues a forced view, or reports the workers that the job is waiting for; returns False to keep waiting.

    After the last round, no quorum is required, because no more rounds are committed.
    """
    sources = job.views.sources()
    if not sources:
        return job.ending_s is None and _nobody_left(job, now_s)
    if job.ending_s is None and not job.views.is_allowed():
        away = [worker for worker in job.views.concerned if worker.may_return]
        job.lacks_quorum = True
        return _must_end(job, away, "the others are too few to continue without them", now_s)
    if all(worker.trains for worker in job.views.concerned) and job.breaks.are_too_many(job.policy, now_s):
        reasons = "; ".join(f"worker {uid}: {reason}" for uid, reason in job.breaks.reasons.items())
        again = f"The workers' connections broke more than {job.policy.most_breaks} times without a round in between"
        job.end(EndOrder(1, f"{again}, though all workers live. They report: {reasons}"))
        return True
    job.held = None
    job.notify(f"{len(sources)} workers continue: {why}" if len(sources) > 1 else f"1 worker continues: {why}")
    job.give([worker for worker in sources if worker.leaving is None] or sources, is_planned=False)
    return True


def fence(job: ElasticJob) -> None:
    """Orders launchers to kill stopped workers that no valid view contains."""
    if job.withheld is not None or job.over is not None:
        return  # another coordinator that lacks the latest view may still need the stopped workers
    for worker in job.registry.workers.values():
        is_needless = worker.phase is not WorkerPhase.MEMBER and not worker.has_finished
        if worker.is_stopped and is_needless and not worker.is_fenced:
            worker.is_fenced = True
            job.orders.append(FenceStalledOrder(worker.machine.name, worker.uid))


def _nobody_left(job: ElasticJob, now_s: float) -> bool:
    """Waits for a worker that holds, or may hold, the state; if there is none, the job restarts or ends.

    A worker that is merely suspended still has its state, so the job waits until it resumes or exits.
    """
    members = job.views.concerned
    if away := [worker for worker in members if worker.may_return]:
        job.lacks_quorum = not job.views.is_allowed()
        if stopped := [worker for worker in away if worker.is_stopped]:
            why = "it is stopped, and no other worker holds the job's state; send it SIGCONT"
            _report_missing(job, stopped, why, now_s)
            return False
        return _must_end(job, away, "no other worker holds the job's state", now_s)
    unsure = [worker for worker in job.views.newcomers if worker.trains]
    if unsure and _wait_for(job, unsure, "they may hold the job's state", now_s, job.policy.hope_s):
        return False
    if not job.views.may_have_begun():
        job.notify("all workers ended before the first round; the job starts again")
        job.views.forget()
        job.breaks.answered()
        job.fingerprint = job.held = None
        return True
    ends = "; ".join(worker.absence for worker in members if not worker.is_here)
    gone = f"The job's state is lost, because every worker that held it has ended: {ends}."
    job.end(EndOrder(1, f"{gone} Start again from a checkpoint."))
    return True


def _must_end(job: ElasticJob, missing: list[WorkerRecord], why: str, now_s: float) -> bool:
    """Waits for workers without which the job cannot continue; ends the job if they do not return in time."""
    timeout_s = job.policy.quorum_timeout_s
    if _wait_for(job, missing, why, now_s, timeout_s):
        return False
    absences = "; ".join(worker.absence for worker in missing)
    job.end(EndOrder(1, f"Waited {timeout_s:.0f} s, because {why}: {absences}."))
    return True


def _wait_for(job: ElasticJob, missing: list[WorkerRecord], why: str, now_s: float, timeout_s: float) -> bool:
    """Reports, but only once, which workers the job is waiting for; returns False after `timeout_s`."""
    _report_missing(job, missing, why, now_s)
    job.due_s.append(job.held_s + timeout_s)
    return now_s < job.held_s + timeout_s


def _report_missing(job: ElasticJob, missing: list[WorkerRecord], why: str, now_s: float) -> None:
    text = f"waiting for {', '.join(member.uid for member in missing)}: {why}"
    if job.held is None:
        job.held_s = now_s
    if job.held != text:
        job.held = text
        job.notify(text)
        for worker in job.views.concerned:
            if worker.trains:
                job.send(worker, WaitNotice(text))
