"""Simulates an elastic job in virtual time: the real coordinator, model workers, and faults of all kinds.

`World(seed).run()` runs one schedule and raises `Violation` if an invariant is violated. These invariants are checked:
- there is one history: all workers that commit a round have the same digest, and none restarts from a new state, which
  would have another digest;
- view numbers increase, and each number has one list of members;
- no worker reports broken connections without a cause, and no newcomer starts in the middle of a batch;
- no view excludes the majority of the last view that all its members entered;
- the job ends with code 0 after all rounds, or with another code for a reason that the faults explain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from random import Random

from elastic_model.faults import GENTLE, KINDS, check_end, check_view, current_of, fenced, strike
from elastic_model.members import NO_STATE, Group, Member, Site, Violation
from elastic_model.receivers import Learner, begin_transfers, log_all, receive_transfer
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    CoordinatorOrder,
    EndOrder,
    FenceStalledOrder,
    FromWorker,
    NotifyOrder,
    SendOrder,
    StartOrder,
    View,
    ViewFailed,
)

LONGEST_S = 5000.0
MOST_EVENTS = 20_000


class World:
    """One schedule."""

    agrees_on_views = True  # mutation: if False, each worker enters a planned view as soon as it has received it
    waits_for_the_log = True  # mutation: if False, a receiver enters a planned view as soon as it has received it
    snapshots_at_batches = True  # mutation: if False, senders also take snapshots in the middle of batches
    drains = True  # mutation: if False, a death is reported before the worker's last messages

    def __init__(self, seed: int, sites: int | None = None, faults: Sequence[tuple[int, str]] | None = None) -> None:
        """Creates a job.

        Args:
            seed: The seed for the choices that other arguments do not determine.
            sites: The initial number of machines.
            faults: Pairs of a number of events and the kind of fault that is injected after that number of events.
        """
        self.seed = seed
        self.random = random = Random(seed)
        self.chance = random.random
        self.now_s = 0.0
        self.heap: list[tuple[float, int, Member | None, Callable[..., None], tuple[object, ...]]] = []
        self.count = 0
        self.batch = random.choice((1, 2, 3))
        self.can_catch_up = self.chance() < 0.3  # newcomers receive the state while the others train
        self.slowness_of_replay = random.choice((0.1, 0.5, 1.5))  # of replayed rounds, relative to computed ones
        self.rounds = random.randint(1, 20 if self.can_catch_up else 3) * self.batch
        self.left_out_ends = self.chance() < 0.5  # a worker that a view excludes exits instead of joining again
        self.is_rude = self.chance() < 0.3
        self.slowness = random.choice((0.2, 1.0, 1.0, 5.0))  # how slow messages are relative to the workers
        number = sites or random.choice((1, 1, 2, 3))
        slots = [random.randint(1, 3 if number < 3 else 2) for _ in range(number)]
        min_workers = random.randint(1, max(1, sum(slots) - 1))
        self.policy = CoordinatorPolicy(min_workers=min_workers, max_machines=9, start_patience_s=1.0, hope_s=10.0)
        self.coordinator = Coordinator(self.policy, 0.0)
        self.ticking_s: float | None = None
        self.names = 0
        self.sites: dict[str, Site] = {}
        self.members: dict[str, Member] = {}
        self.groups: dict[int, Group] = {}
        self.views: dict[int, View] = {}
        self.results: dict[int, int] = {}
        self.last_formed: View | None = None  # the last view that all its members have entered
        self.reported_dead: set[str] = set()
        self.over: EndOrder | None = None
        self.log: list[str] | None = None
        self.faults = self.some_faults() if faults is None else sorted(faults, reverse=True)
        self.is_calm = not self.is_rude and all(kind in GENTLE for _, kind in self.faults)
        self.is_cursed = False
        self.laggards = random.choice((0.0, 0.0, 0.3))  # share of workers whose reports are slow
        self.copy_s = random.choice((0.03, 0.3, 1.0))  # time for a newcomer to receive the state
        for at in range(number):
            self.at(self.chance() * 0.2, None, self.site_joins, self.new_site(str(at), slots[at], 6))

    def some_faults(self) -> list[tuple[int, str]]:
        """Returns random faults in reverse order. Faults often follow one another closely."""
        random, found = self.random, []
        when = random.randint(1, 90)
        for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4))):
            found.append((when, random.choice(KINDS)))
            when += random.randint(0, 40)
        return found[::-1]

    def at(self, when_s: float, member: Member | None, call: Callable[..., None], *args: object) -> None:
        """Schedules a call at a given time. Calls for a frozen member are delayed."""
        self.count += 1
        heappush(self.heap, (when_s, self.count, member, call, args))

    def after(self, delay_s: float, member: Member | None, call: Callable[..., None], *args: object) -> None:
        """Schedules a call after a delay."""
        self.count += 1
        heappush(self.heap, (self.now_s + delay_s, self.count, member, call, args))

    def later(self, most_s: float, member: Member | None, call: Callable[..., None], *args: object) -> None:
        """Schedules a call at a random time within `most_s` seconds."""
        self.count += 1
        heappush(self.heap, (self.now_s + most_s * self.chance(), self.count, member, call, args))

    def run(self) -> World:
        """Runs the schedule to the end."""
        played, faults, heap = 0, self.faults, self.heap
        while self.over is None:
            if not heap:
                raise Violation(f"nothing happens any more, and the job has not ended: {self.history()}")
            self.now_s, _, member, call, args = heappop(heap)
            if member is not None and member.is_frozen:
                member.backlog.append((call, args))
                continue
            if self.log is not None:
                self.log.append(f"{self.now_s:9.4f} {member.uid if member else '':8} {call.__name__} {args}")
            call(*args)
            played += 1
            while faults and faults[-1][0] <= played:
                strike(self, faults.pop()[1])
            if played > MOST_EVENTS or self.now_s > LONGEST_S:
                raise Violation(f"the job does not end: {self.history()}")
        check_end(self, self.over)
        return self

    def history(self) -> str:
        """Returns a description of the current state."""
        states = ", ".join(f"{each.uid} {each.state} {each.round}" for each in self.members.values())
        replay = f"PYTHONPATH=tests:tests/support python -m elastic_model {self.seed}"
        return f"{replay}, {self.now_s:.3f} s, {len(self.results)} of {self.rounds} rounds, {states}"

    def receiver(self, member: Member) -> Learner:
        """Returns the receiving part of a member."""
        return Learner(self, member)

    receive_transfer = staticmethod(receive_transfer)
    begin_transfers = staticmethod(begin_transfers)
    log_all = staticmethod(log_all)

    def group(self, view: View) -> Group:
        """Returns the connections of a view."""
        found = self.groups.get(view.generation)
        if found is None:
            found = self.groups[view.generation] = Group(self, view)
        return found

    def new_site(self, name: str, slots: int, attempts: int) -> Site:
        """Creates a machine, whose results may differ bitwise from those of other machines."""
        site = Site(name, slots, attempts)
        if self.chance() < 0.02:
            site.fingerprint = "other"
        return site

    def new_name(self) -> str:
        """Returns a name for a machine that joins later."""
        self.names += 1
        return str(9 + self.names)

    def connects(self, uids: Iterable[str]) -> bool:
        """Returns True if these workers can reach each other."""
        sites = {self.members[uid].site for uid in uids}
        return len(sites) < 2 or not any(each.is_isolated for each in sites)

    def committed(self, member: Member, round_: int) -> None:
        """A member has committed a round."""
        if self.results.setdefault(round_, member.digest) != member.digest:
            raise Violation(f"{member.uid} has another result of round {round_}: {self.history()}")

    def up(self, member: Member, message: FromWorker) -> None:
        """A worker sends a message to the coordinator."""
        if self.is_calm and type(message) is ViewFailed and message.round != NO_STATE:
            raise Violation(f"{member.uid} reports {message} without a cause; {self.history()}")
        member.standing.receive(message)
        self.report(member, "said", message)

    def report(self, member: Member, kind: str, *args: object) -> None:
        """A launcher sends a report about a worker. Only reports about the same worker arrive in order."""
        site = member.site
        if not site.is_cut:
            delay_s = 0.02 * self.slowness * member.lag * self.chance()
            member.last_up_s = when_s = max(member.last_up_s, self.now_s + delay_s)
            self.at(when_s, None, self.arrives, site, site.cuts, kind, member.uid, args)

    def arrives(self, site: Site, cuts: int, kind: str, uid: str, args: tuple[object, ...]) -> None:
        """A report reaches the coordinator, unless the connection has been closed."""
        if site.cuts != cuts:
            return
        coordinator = self.coordinator
        if kind == "said":
            self.obey(coordinator.handle_worker_message(uid, args[0], self.now_s))
        elif kind == "started":
            self.obey(coordinator.worker_started(uid, site.name, self.now_s))
        elif kind == "ended":
            self.reported_dead.add(uid)
            self.obey(coordinator.worker_ended(uid, *args, self.now_s))
        elif kind == "stalled":
            self.obey(coordinator.worker_stalled(uid, "stopped", self.now_s))
        else:
            self.obey(coordinator.slots_changed(site.name, *args, self.now_s))

    def is_unheard(self, member: Member) -> bool:
        """Returns True if the coordinator has not received the report that a worker has exited."""
        return member.state == "dead" and member.uid not in self.reported_dead

    def ended(self, member: Member, code: int) -> None:
        """A process has exited: its launcher reports this, and may start another process."""
        site = member.site
        if site.is_gone:
            return
        if not self.drains:
            self.heap[:] = [each for each in self.heap if each[3] != self.arrives or each[4][3] != member.uid]
            heapify(self.heap)
        how = f"exit code {code}"
        self.report(member, "ended", how, code)
        if not site.replaces or member.has_finished:
            return
        if site.attempts and code not in (0, 2):
            site.attempts -= 1
            self.later(0.5, None, self.starts, site, member.slot)
        else:
            site.slots -= 1
            self.report(member, "slots", site.slots)

    def site_joins(self, site: Site) -> None:
        """A machine joins the job."""
        self.sites[site.name] = site
        self.obey(self.coordinator.machine_joined(site.name, f"host-{site.name}", site.slots, self.now_s))
        self.obey(self.coordinator.machine_listed(site.name, self.now_s))

    def starts(self, site: Site, slot: int) -> None:
        """A launcher starts a worker."""
        if site.is_gone or not site.replaces:
            return
        member = Member(self, len(self.members), site, slot)
        self.members[member.uid] = member
        member.lag = 20.0 if self.chance() < self.laggards else 1.0
        self.report(member, "started")
        self.later(0.4, member, member.booted)

    def obey(self, orders: list[CoordinatorOrder]) -> None:
        """Carries out the coordinator's orders."""
        for order in orders:
            if type(order) is SendOrder:
                member, message = self.members[order.uid], order.message
                if type(message) is View:
                    check_view(self, message)
                site = member.site
                if not site.is_cut:
                    when_s = max(member.last_down_s, self.now_s + 0.02 * self.slowness * self.chance())
                    member.last_down_s = when_s
                    self.at(when_s, None, self.told, member, site.cuts, message)
            elif type(order) is StartOrder:
                site = self.sites[order.machine]
                if not site.has_begun:
                    site.has_begun = True
                    for slot in range(site.slots):
                        self.later(0.1, None, self.starts, site, slot)
            elif type(order) is CloseSlotsOrder:
                self.sites[order.machine].replaces = False
            elif type(order) is FenceStalledOrder:
                member = self.members[order.uid]
                if not member.site.is_cut:
                    self.later(0.02 * self.slowness, None, self.fenced, member, member.site.cuts)
            elif type(order) is EndOrder:
                self.over = order
            elif self.log is not None and type(order) is NotifyOrder:
                self.log.append(f"{self.now_s:9.4f} SAY {order.text}")
        due_s = self.coordinator.deadline_s
        if due_s is not None and due_s != self.ticking_s:
            self.ticking_s = due_s
            self.at(max(due_s, self.now_s), None, self.tick, due_s)

    def told(self, member: Member, cuts: int, message: object) -> None:
        """A message reaches a worker's machine."""
        if member.site.cuts != cuts or member.state == "dead":
            return
        if member.is_frozen:
            member.backlog.append((member.hear, (message,)))
        else:
            member.hear(message)

    def fenced(self, member: Member, cuts: int) -> None:
        """A launcher receives the order to kill a stopped worker."""
        if member.site.cuts == cuts:
            fenced(member, self.current())

    def current(self) -> set[str]:
        """Returns the workers that the coordinator counts as members."""
        return current_of(self.coordinator)

    def tick(self, due_s: float) -> None:
        """Calls the coordinator's `tick`."""
        if self.ticking_s == due_s:
            self.ticking_s = None
            self.obey(self.coordinator.tick(self.now_s))
