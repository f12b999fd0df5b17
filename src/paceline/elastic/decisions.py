"""What follows from the facts: the next view, whom to wait for, and when the job ends.

`settle` looks at the facts alone and may be called at any time. The rules, in the order in which they are applied:

1. Once a member has finished, all rounds are committed and every member has the final state: nobody comes in any more,
   no quorum is needed, and the job ends when all members have finished and ended (`ending.py`).
2. When a member of the base is gone (ended, stalled, or on a machine out of reach), or when connections broke and the
   death that would explain it has not been reported for `break_patience_s`, a forced view takes the other members of
   the base, and those newcomers that have entered the planned view. It needs a quorum.
3. When a newcomer is gone before anybody entered the planned view, another planned view replaces it: the members of the
   base are not disturbed.
4. When everybody has entered the latest view, those who are ready come in, and those who leave go, by a planned view.
5. If nobody who holds the state is left: members that may still come back are awaited; newcomers of whom it is not
   known are asked for (they report what they hold when their connections break); if no round can have been
   committed, the job begins again; otherwise its state is lost, and it ends.

What is expected of workers: a forced view is entered at once, wherever a worker is. A planned view is entered at the
beginning of a batch, by agreement; a worker whose connections broke within a batch does *not* enter it, since newcomers
cannot begin in the middle of one, but waits for a forced view. A worker that waits for the others between two batches
(in a view that must wait, or because the planned view is not formed yet) enters any newer view that contains it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paceline.elastic.breaks import Break, Breaks
from paceline.elastic.ending import exit_of, lost_state, waits_for
from paceline.elastic.messages import Broken, Dismissed, Installed, ToWorker, View, Wait
from paceline.elastic.orders import Begin, End, Orders, Say, StopReplacing, Tell
from paceline.elastic.policy import Policy
from paceline.elastic.roster import Place, Roster, Worker
from paceline.elastic.views import Views


@dataclass
class Hold:
    """A wait that stops the job: for whom, and since when."""

    text: str
    since_s: float


class Decisions:
    """The facts about a job, and the orders that follow from them."""

    def __init__(self, policy: Policy, now_s: float, term: int) -> None:
        self.policy = policy
        self.roster = Roster()
        self.views = Views(self.roster, term)
        self.over: End | None = None
        self.deadline_s: float | None = now_s + policy.join_timeout_s
        self._began_s = now_s
        self._fingerprint: str | None = None  # of the first view's members
        self._breaks = Breaks()
        self._hold: Hold | None = None
        self._few_s: float | None = None  # since when there are fewer members than the job needs
        self._leaving_s: float | None = None  # since when all members have been asked to leave
        self._ending_s: float | None = None  # since when a member has finished
        self._orders: Orders = []
        self._due: list[float] = []
        self._said = ""

    def settle(self, now_s: float) -> Orders:
        """Returns what is to be done now, and sets `deadline_s`."""
        while self.over is None:
            self._due = []
            if not self._step(now_s):
                break
        self.deadline_s = min(self._due, default=None) if self.over is None else None
        orders, self._orders = self._orders, []
        return orders

    def asked(self, worker: Worker, fingerprint: str, now_s: float) -> None:
        """A worker asks to take part."""
        if worker.place is Place.MEMBER:
            if worker.has_state:  # it says that it has none any more
                worker.place, worker.has_state, worker.ready_s = Place.READY, False, now_s
            return
        worker.fingerprint = fingerprint
        if worker.leaving is not None:
            self._dismiss(worker, f"asked to end: {worker.leaving}")
        elif self._ending_s is not None:
            self._dismiss(worker, "the job is done")
        elif self._fingerprint not in (None, fingerprint):
            self._refuse(worker, self._fingerprint or "")
        elif worker.place is Place.OUTSIDE:
            worker.place, worker.ready_s = Place.READY, now_s

    def entered(self, worker: Worker, message: Installed) -> None:
        """A worker has entered a view."""
        self._breaks.went_on(message.round)
        self.views.entered(worker, message.generation)

    def broke(self, worker: Worker, message: Broken, now_s: float) -> None:
        """A worker's connections broke."""
        self._breaks.went_on(message.round)
        latest, base = self.views.latest, self.views.base
        if worker.place is not Place.MEMBER or latest is None or base is None or message.generation < base.generation:
            return  # it has been told a view since
        is_forming = base.generation < message.generation and worker.installed < message.generation
        if is_forming and message.generation < latest.generation:
            return
        if is_forming and not worker.has_state:
            worker.place, worker.denies = Place.OUTSIDE, True
            return
        report = Break(message.generation, now_s + self.policy.break_patience_s, is_between=is_forming)
        self._breaks.reported(worker.uid, report, message.reason)

    def leaves(self, worker: Worker, reason: str) -> None:
        """A worker was asked to end."""
        if worker.leaving is None:
            worker.leaving = reason
            if worker.place is not Place.MEMBER:
                self._dismiss(worker, f"asked to end: {reason}")

    def remind(self, worker: Worker) -> None:
        """Tells a worker what it may have missed."""
        if worker.place is Place.DISMISSED:
            self._tell(worker, Dismissed("the job needs it no more"))
            return
        base, latest = self.views.base, self.views.latest
        if base is not None and base is not latest and worker.uid in base.members:
            self._tell(worker, base)
        if latest is not None:
            self._tell(worker, latest)

    def say(self, text: str) -> None:
        """Adds a sentence for the user."""
        if text != self._said:
            self._said = text
            self._orders.append(Say(text))

    def _step(self, now_s: float) -> bool:
        """Applies the first rule that does something; returns whether one did, so that another may follow."""
        self._begin_machines()
        if self._finish(now_s):
            return True
        if self.views.latest is None:
            return self._give_first(now_s)
        if self._closes():
            return False
        if (why := self._why_forced(now_s)) is not None:
            return self._force(why, now_s)
        self._hold = None
        if self._ending_s is not None:
            return False
        if self._must_replace():
            self._plan()
            return True
        return self._grow(now_s)

    def _begin_machines(self) -> None:
        begun = sum(each.has_begun and each.is_reachable for each in self.roster.machines.values())
        for machine in self.roster.machines.values():
            if machine.has_begun or machine.named is not None or not machine.is_reachable or not machine.slots:
                continue
            if begun < self.policy.max_machines and self._ending_s is None:
                machine.has_begun = True
                begun += 1
                self._orders.append(Begin(machine.name))

    def _finish(self, now_s: float) -> bool:
        """Applies rule 1."""
        workers = list(self.roster.workers.values())
        if not any(each.has_finished for each in workers):
            return False
        if self._ending_s is None:
            self._ending_s = now_s
            self._close_doors("the job is done")
        missing = waits_for(workers, self.views)
        for each in workers:
            if each.lives and each not in missing and each.place in (Place.READY, Place.MEMBER):
                self._dismiss(each, "the job is done")
        if any(each.is_here for each in missing):
            return False
        has_one_ended_well = any(each.has_finished and not each.lives and each.exit_code == 0 for each in workers)
        until_s = self._ending_s + (self.policy.hope_s if has_one_ended_well else self.policy.quorum_timeout_s)
        if missing and now_s < until_s:
            self._due.append(until_s)
            return False
        self._end(exit_of(workers))
        return True

    def _close_doors(self, reason: str) -> None:
        for machine in self.roster.machines.values():
            machine.replaces = False
            self._orders.append(StopReplacing(machine.name, reason))

    def _closes(self) -> bool:
        """Waits for the last members to end, after they were all asked to."""
        members = self.views.concerned()
        if not members or any(each.place is not Place.DISMISSED for each in members):
            return False
        if not any(each.is_here for each in members):
            self._end(End(1, "All workers were asked to leave before the last round; nobody was left to hand over to."))
        return True

    def _give_first(self, now_s: float) -> bool:
        policy, ready, expected = self.policy, self.roster.ready(), self.roster.expected()
        if len(ready) >= policy.min_workers:
            until_s = ready[0].ready_s + policy.start_patience_s
            if len(ready) >= expected or now_s >= until_s:
                return self._start(ready)
            self._due.append(until_s)
            return False
        until_s = self._began_s + policy.join_timeout_s
        self._due.append(until_s)
        there = f"{len(ready)} of at least {policy.min_workers} workers are ready"
        if now_s >= until_s:
            self._end(End(1, f"{there} after {policy.join_timeout_s:.0f} s; look at the output of the others"))
        elif self.roster.machines and not self._can_grow():
            self._end(End(1, f"{there}, and no other will be started; look at the output of those that ended"))
        return self.over is not None

    def _start(self, ready: list[Worker]) -> bool:
        counts = Counter(each.fingerprint for each in ready)
        fingerprint = max(counts, key=lambda each: counts[each])  # the first that asked, if two are as many
        for worker in ready:
            if worker.fingerprint != fingerprint:
                self._refuse(worker, fingerprint)
        chosen = [each for each in ready if each.fingerprint == fingerprint]
        if len(chosen) < self.policy.min_workers:
            return True
        self._fingerprint = fingerprint
        self._give(chosen, is_planned=False)
        return True

    def _why_forced(self, now_s: float) -> str | None:
        """Returns why a forced view is needed, or None (rule 2)."""
        views = self.views
        latest, base = views.latest, self.roster.named(views.base_members)
        if latest is None:
            return None
        for each in base:
            has_left = each.uid not in latest.members and each.leaving is not None and each.exit_code == 0
            if not each.trains and not each.has_finished and not (has_left and not each.lives):
                return each.absence
        if self._has_been_entered(latest):
            for each in views.newcomers():
                if not each.trains and not each.has_finished:
                    return each.absence
        if not latest.is_planned:
            for each in base:
                if each.has_finished and each.installed < latest.generation:
                    return f"worker {each.uid} has finished"
        for uid, report in self._breaks.waiting.items():
            if now_s >= report.due_s or views.is_explained(report.generation):
                return f"worker {uid} reports: {self._breaks.reasons.get(uid, 'its connections broke')}"
            self._due.append(report.due_s)
        return None

    def _has_been_entered(self, view: View) -> bool:
        return any(each.installed >= view.generation for each in self.views.members())

    def _force(self, why: str, now_s: float) -> bool:
        """Gives a forced view, or says what it has to wait for (rules 2 and 5)."""
        sources = self.views.sources()
        if not sources:
            return self._ending_s is None and self._nobody_left(now_s)
        if self._ending_s is None and not self.views.is_allowed():
            away = [each for each in self.views.concerned() if each.may_return]
            return self._must_end(away, "the others are too few to go on without them", now_s)
        is_unexplained = all(each.trains for each in self.views.concerned())
        if is_unexplained and self._breaks.are_too_many(self.policy, now_s):
            reasons = "; ".join(f"worker {uid}: {reason}" for uid, reason in self._breaks.reasons.items())
            again = f"The workers' connections broke {self.policy.most_breaks} times without a round between"
            self._end(End(1, f"{again}, though all workers live. They report: {reasons}"))
            return True
        self._hold = None
        self.say(f"{len(sources)} workers go on: {why}")
        self._give([each for each in sources if each.leaving is None] or sources, is_planned=False)
        return True

    def _nobody_left(self, now_s: float) -> bool:
        """Applies rule 5."""
        members = self.views.concerned()
        if away := [each for each in members if each.may_return]:
            return self._must_end(away, "nobody else holds the job's state", now_s)
        unsure = [each for each in self.views.newcomers() if each.trains and not each.denies]
        if unsure and self._wait_for(unsure, "they may hold the job's state", now_s, self.policy.hope_s):
            return False
        if not self.views.has_begun and all(not each.lives and each.was_drained for each in members):
            self.say("all workers ended before the first round; the job begins again")
            self.views.forget()
            self._breaks.answered(is_planned=False)
            self._fingerprint = self._hold = None
            return True
        self._end(End(1, lost_state(self.views)))
        return True

    def _must_end(self, missing: list[Worker], why: str, now_s: float) -> bool:
        """Waits for workers without whom the job cannot go on; ends it when they do not come back."""
        timeout_s = self.policy.quorum_timeout_s
        if self._wait_for(missing, why, now_s, timeout_s):
            return False
        absences = "; ".join(each.absence for each in missing)
        self._end(End(1, f"Waited {timeout_s:.0f} s, because {why}: {absences}."))
        return True

    def _wait_for(self, missing: list[Worker], why: str, now_s: float, timeout_s: float) -> bool:
        """Says whom the job waits for, once; returns False when it has waited long enough."""
        text = f"waiting for {', '.join(each.uid for each in missing)}: {why}"
        since_s = now_s if self._hold is None else self._hold.since_s
        if self._hold is None or self._hold.text != text:
            self.say(text)
            for worker in self.views.concerned():
                if worker.trains:
                    self._tell(worker, Wait(text))
        self._hold = Hold(text, since_s)
        self._due.append(since_s + timeout_s)
        return now_s < since_s + timeout_s

    def _must_replace(self) -> bool:
        """Returns whether the planned view cannot come about, and nobody has entered it (rule 3)."""
        latest = self.views.latest
        if latest is None or self.views.is_complete or not latest.is_planned:
            return False
        return any(not each.trains for each in self.views.newcomers())

    def _grow(self, now_s: float) -> bool:
        """Lets workers in and out by a planned view (rule 4); returns whether it did."""
        views, ready = self.views, self.roster.ready()
        if views.latest is None or not views.is_complete or self._breaks.waiting:
            return False
        self._watch_number(views.latest, now_s)
        if self.over is not None:
            return True
        members = views.members()
        leavers = [each for each in members if each.leaving is not None]
        if len(leavers) == len(members) and not ready:
            return self._dismiss_last(leavers, now_s)
        if not leavers and not ready:
            return False
        due_s = now_s if leavers else ready[0].ready_s + self.policy.gather_s
        if now_s < due_s:
            self._due.append(due_s)
            return False
        if not views.is_allowed():
            return False
        self._plan()
        return True

    def _plan(self) -> None:
        """Gives a planned view of the base's members, the newcomers that are still there and those who are ready.

        Those who were asked to end are left out, unless nobody else holds the state yet.
        """
        base = [each for each in self.roster.named(self.views.base_members) if each.trains]
        staying = [each for each in base if each.leaving is None] or base
        newcomers = [each for each in self.views.newcomers() if each.trains]
        self._give([*staying, *newcomers, *self.roster.ready()], is_planned=True)

    def _dismiss_last(self, leavers: list[Worker], now_s: float) -> bool:
        """Lets the last members go; if others are about to come, not before they were given some time."""
        if self._leaving_s is None:
            self._leaving_s = now_s
        due_s = self._leaving_s + self.policy.start_patience_s
        if self.roster.can_grow() and now_s < due_s:
            self._due.append(due_s)
            return False
        for worker in leavers:
            self._dismiss(worker, f"asked to end: {worker.leaving}")
        return True

    def _watch_number(self, latest: View, now_s: float) -> None:
        """Says that workers are missing, and ends the job when they have been for too long."""
        if not latest.must_wait:
            self._few_s = None
            return
        if self._few_s is None:
            self._few_s = now_s
            self.say(f"{len(latest.members)} of at least {self.policy.min_workers} workers are left; waiting for more")
        until_s = self._few_s + self.policy.join_timeout_s
        self._due.append(until_s)
        if now_s >= until_s or not self._can_grow():
            waited = (
                f"waited {now_s - self._few_s:.0f} s for others" if self._can_grow() else "no other will be started"
            )
            few = f"{len(latest.members)} of at least {self.policy.min_workers} workers are left"
            self._end(End(1, f"{few}, and {waited}; look at the output of those that ended."))

    def _can_grow(self) -> bool:
        begun = sum(each.has_begun and each.is_reachable for each in self.roster.machines.values())
        return begun < self.policy.max_machines or self.roster.can_grow()

    def _give(self, members: list[Worker], *, is_planned: bool) -> None:
        told = {each.uid: each for each in [*members, *self.views.concerned()]}
        must_wait = len(members) < self.policy.min_workers and self._ending_s is None
        view = self.views.give(members, is_planned=is_planned, must_wait=must_wait)
        self._breaks.answered(is_planned=is_planned)
        for worker in told.values():
            self._tell(worker, view)

    def _tell(self, worker: Worker, message: ToWorker) -> None:
        if worker.lives and worker.machine.is_reachable:
            self._orders.append(Tell(worker.machine.name, worker.uid, message))

    def _dismiss(self, worker: Worker, reason: str, code: int = 0) -> None:
        worker.place = Place.DISMISSED
        self._tell(worker, Dismissed(reason, code))

    def _refuse(self, worker: Worker, expected: str) -> None:
        """Turns away a worker whose results would have other bits, and its machine's others with it."""
        reason = f"worker {worker.uid} on {worker.machine.host} would compute other bits: it has"
        reason = f"{reason} {worker.fingerprint!r}, and the job's members have {expected!r}"
        self.say(reason)
        self._dismiss(worker, f"{reason}. Use machines and settings that are alike", 2)
        if worker.machine.replaces:
            worker.machine.replaces = False
            self._orders.append(StopReplacing(worker.machine.name, reason))

    def _end(self, end: End) -> None:
        self.over = end
        self._orders.append(end)
