"""Simulates elastic jobs that may lose their coordinator: several launchers with links between them, in virtual time.

`Realm(seed).run()` runs one schedule. Workers, rounds and views are those of `world.py`. In addition, every machine has
a launcher that can coordinate, and the links can delay messages, be cut, recover and be reset. In addition to the
single history, these invariants are checked:
- each view number has one list of members, and each term has one coordinator;
- no two views produce results at the same time;
- the job completes if all links recover and no machine is lost permanently.
"""

from __future__ import annotations

from elastic_model.faults import freeze
from elastic_model.launchers import SEEKS_S, Launcher, Link
from elastic_model.members import NO_STATE, Group, Member, Site, Violation
from elastic_model.world import World
from paceline.operate.launch.elastic.machine_log import MachineState
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import CoordinatorPolicy
from paceline.train.elastic.coordinator.election import ConnectionLoss, ContactResult, CoordinatorSearch
from paceline.train.elastic.protocol import CoordinatorOrder, EndOrder, FromWorker, NotifyOrder, SendOrder, View

SILENT_S = 2.0
CALL_S, QUIET_S, QUIET_SINCE_A_CALL_S = 0.25, 2.0, 5.0  # how long a restarted launcher at the rendezvous address waits
FAULTS = (
    *("kill", "kill", "kill newest", "freeze", "leave", "reset", "cut", "cut", "cut control", "split", "split"),
    *("crash coordinator", "crash coordinator", "crash", "power", "reset links", "reset links", "shrink"),
    *("freeze machine", "split at view", "split at view", "leave coordinator", "leave coordinator"),
)  # fmt: skip
HANDED_OVER = EndOrder(0, "handed over")
LASTING = {"power", "crash", "crash coordinator", "restart"}
TEARING = {
    "cut",
    "split",
    "split at view",
    "change sides",
    "storm",
}  # workers may be unable to connect to each other even if the coordinator can reach all of them


class RealmGroup(Group):
    """The connections of a view; its members rendezvous in the store of the launcher that announced the view."""

    __slots__ = ("decided_s", "met_s")

    def __init__(self, world: World, view: View) -> None:
        super().__init__(world, view)
        self.met_s = self.decided_s = -1.0  # when all members arrived, and when they last had a result

    def arrive(self, member: Member) -> None:
        realm = self.world
        assert isinstance(realm, Realm)
        if not realm.reaches_store(member.site, self.view):
            realm.later(0.05, member, member.broke, self, "the store is gone")
            return
        super().arrive(member)
        if len(self.arrived) == len(self.view.members):
            self.met_s = realm.now_s

    def contribute(self, member: Member) -> None:
        """Checks that no other view produces a result while this one is formed."""
        round_, realm = member.round, self.world
        assert isinstance(realm, Realm)
        super().contribute(member)
        if self.has_failed or len(self.contributions[round_]) < len(self.view.members):
            return
        if round_ == realm.rounds:
            return  # no quorum is needed after the last round, because all members have the final state
        self.decided_s = realm.now_s
        for other in realm.groups.values():
            if other is not self and isinstance(other, RealmGroup) and other.decided_s > self.met_s:
                raise Violation(f"two views at once: {self.view} and {other.view}; {realm.history()}")


class Realm(World):
    """One schedule."""

    calls_while_seeking = True  # mutation: if False, only a coordinating launcher announces the job

    def __init__(
        self,
        seed: int,
        faults: list[tuple[int, str]] | None = None,
        slots: list[int] | None = None,
        rounds: int | None = None,
    ) -> None:
        super().__init__(seed, 1, [])
        random = self.random
        self.heap.clear()
        self.sites.clear()
        slots = slots or [random.choice((1, 1, 2)) for _ in range(random.choice((2, 3, 3, 4, 5)))]
        self.rounds = rounds or random.randint(2, 8) * self.batch
        self.policy = CoordinatorPolicy(
            min_workers=random.randint(1, max(1, sum(slots) // 2)),
            max_machines=9,
            start_patience_s=1.0,
            return_patience_s=random.choice((0.0, 3.0)),
        )
        self.cuts: dict[frozenset[str], int] = {}  # unreachable pairs: 1 if only launchers, 2 if workers too
        self.launchers: dict[int, Launcher] = {}
        self.terms: dict[int, int] = {}
        self.elections = 0
        self.superseded = 0  # coordinators that resigned because another one had been elected
        self.elected_s: list[float] = []
        self.handed_over_s: list[float] = []
        self.stores_lost: list[str] = []  # workers whose view lost its store when the launcher handed over
        self.is_lasting = self.was_torn = False
        self.cut_off: Launcher | None = None  # a coordinator that is cut off until another one is elected
        self.splits_at_view = False  # the next forced view's coordinator is cut off before announcing the view
        for at, count in enumerate(slots):
            site = Site(str(at), count, 6)
            self.sites[site.name] = site
            seeker = CoordinatorSearch(at, SEEKS_S, self.chance)
            self.launchers[at] = Launcher(self, site, MachineState(f"host-{at}", count, at, 2 * at), seeker)
        self.first = first = self.launchers[random.randrange(len(slots))]
        home = str(first.number)
        first.coordinator = Coordinator(self.policy, 0.0, 1, home=home, store=home)
        self.terms[1] = first.number
        self.meets_at = first  # the launcher at the rendezvous address
        self.joined_again = self.second_jobs = 0  # launchers that were restarted there and rejoined
        for launcher in self.launchers.values():
            self.at(self.chance() * 0.2, None, self.comes, launcher, first)
        self.faults = self.some_faults() if faults is None else sorted(faults, reverse=True)
        self.is_calm = not self.is_rude and not self.faults

    def some_faults(self) -> list[tuple[int, str]]:
        random, found = self.random, []
        when = random.randint(30, 300)
        for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4))):
            found.append((when, random.choice(FAULTS)))
            when += random.randint(0, 60)
        return found[::-1]

    def comes(self, launcher: Launcher, first: Launcher) -> None:
        """A launcher joins the job through its coordinator."""
        site = launcher.site
        if first.coordinator is None or not first.lives or not self.reach(first.site, site):
            self.launcher_over(launcher, EndOrder(1, "no rendezvous"))
            return
        link = launcher.link = first.followers[launcher.number] = Link(launcher, first)
        assert link is not None
        came = first.coordinator.machine_joined(
            site.name, f"host-{site.name}", site.slots, self.now_s, "there", site.name
        )
        first.obey(came)
        first.obey(first.coordinator.machine_listed(site.name, self.now_s))

    def restart(self) -> None:
        """The launcher at the rendezvous address is killed and restarted with the same command."""
        if self.meets_at.lives:
            self.crash(self.meets_at)
        self.later(0.5, None, self.listens, Site("new", self.meets_at.site.slots, 6), 0.0)

    def listens(self, site: Site, until_s: float) -> None:
        """A restarted launcher waits for an announcement of the job, and starts a job itself if there is none."""
        until_s = until_s or self.now_s + QUIET_S
        others = [each for each in self.launchers.values() if each.lives and each.account.job_state.views]
        leader = next((each for each in others if each.coordinator is not None), None)
        if leader is not None and leader.coordinator is not None and leader.coordinator.resigns_s is None:
            number = len(self.launchers)
            site.name = str(number)
            self.sites[site.name] = site
            account = MachineState(f"host-{number}", site.slots, number, 2 * number)
            self.meets_at = self.launchers[number] = Launcher(
                self, site, account, CoordinatorSearch(number, SEEKS_S, self.chance)
            )
            self.joined_again += 1
            self.comes(self.meets_at, leader)
            return
        if self.calls_while_seeking and any(each.seeker.is_seeking for each in others):
            until_s = self.now_s + QUIET_SINCE_A_CALL_S
        if self.now_s < until_s:
            self.after(CALL_S, None, self.listens, site, until_s)
        elif others:
            self.second_jobs += 1

    def run(self) -> Realm:
        played, faults, heap = 0, self.faults, self.heap
        from heapq import heappop

        while any(each.lives for each in self.launchers.values()):
            if not heap:
                raise Violation(f"nothing happens any more: {self.history()}")
            self.now_s, _, member, call, args = heappop(heap)
            if member is not None and member.is_frozen:
                member.backlog.append((call, args))
                continue
            if self.log is not None:
                who = member.uid if member else str(getattr(getattr(call, "__self__", None), "number", ""))
                self.log.append(f"{self.now_s:9.4f} {who:8} {call.__name__} {_brief(args)}")
            call(*args)
            played += 1
            while faults and faults[-1][0] <= played:
                self.strike(faults.pop()[1])
            if played > 60_000 or self.now_s > 2000.0:
                raise Violation(f"the job does not end: {self.history()}")
        self.check_ends()
        return self

    def history(self) -> str:
        ends = {each.number: each.end.reason or each.end.code for each in self.launchers.values() if each.end}
        replay = f"PYTHONPATH=tests:tests/support python -m elastic_model realm {self.seed}"
        states = ", ".join(f"{each.uid} {each.state} {each.round}" for each in self.members.values())
        return f"{replay}, {self.now_s:.3f} s, {len(self.results)} of {self.rounds} rounds, {states}; ends {ends}"

    # Links.

    def reach(self, one: Site, other: Site, level: int = 1) -> bool:
        """Returns True if two machines' launchers (level 1), or also their workers (level 2), can reach each other."""
        if one is other:
            return True
        return (
            not (one.is_isolated or other.is_isolated) and self.cuts.get(frozenset((one.name, other.name)), 0) < level
        )

    def connects(self, uids: object) -> bool:
        sites = list({self.members[uid].site for uid in uids})  # type: ignore[attr-defined]
        return all(self.reach(one, other, 2) for at, one in enumerate(sites) for other in sites[:at])

    def reaches_store(self, site: Site, view: View) -> bool:
        """Returns True if the store of a view is running and reachable."""
        server = self.launchers[int(view.store)]
        return server.lives and self.reach(site, server.site)

    def group(self, view: View) -> Group:
        found = self.groups.get(view.generation)
        if found is None:
            found = self.groups[view.generation] = RealmGroup(self, view)
        return found

    def send_up(self, link: Link, kind: str, args: tuple[object, ...]) -> None:
        link.up_s = max(link.up_s, self.now_s + 0.01 * self.slowness * self.chance())
        self.at(link.up_s, None, self.arrives_up, link, kind, args)

    def arrives_up(self, link: Link, kind: str, args: tuple[object, ...]) -> None:
        if not link.is_open_above or not link.leader.lives:
            return
        if not self.reach(link.follower.site, link.leader.site):
            link.up_s = max(link.up_s, self.now_s + 0.1)
            self.at(self.now_s + 0.1, None, self.arrives_up, link, kind, args)  # resent until it arrives
        elif kind == "end":
            link.leader.drops(link, "its launcher has ended", has_ended=True)
        elif kind == "away":
            link.leader.drops(link, "it follows another")
        else:
            link.leader.takes(link, kind, args)

    def send_down(self, link: Link, order: CoordinatorOrder | ConnectionLoss) -> None:
        link.down_s = max(link.down_s, self.now_s + 0.01 * self.slowness * self.chance())
        self.at(link.down_s, None, self.arrives_down, link, order)

    def arrives_down(self, link: Link, order: CoordinatorOrder | ConnectionLoss) -> None:
        if not link.is_open_below or not link.follower.lives:
            return
        if not self.reach(link.follower.site, link.leader.site):
            link.down_s = max(link.down_s, self.now_s + 0.1)
            self.at(self.now_s + 0.1, None, self.arrives_down, link, order)
        elif isinstance(order, ConnectionLoss):
            link.follower.lost(link, order)
        else:
            link.follower.hears(link, order)

    def dial(self, launcher: Launcher, number: int) -> None:
        other = self.launchers[number]
        if other is launcher:
            self.dialed(launcher, number)
        elif not self.reach(launcher.site, other.site):
            self.after(0.3, None, launcher.answered, number, ContactResult.SILENT)
        else:
            self.later(0.01, None, self.dialed, launcher, number)

    def dialed(self, launcher: Launcher, number: int) -> None:
        """The connection is established, and the other launcher answers."""
        other = self.launchers[number]
        if not launcher.lives or launcher.link is not None:
            return
        if not self.reach(launcher.site, other.site):
            self.after(0.3, None, launcher.answered, number, ContactResult.SILENT)
        elif not other.lives:
            self.later(0.01, None, launcher.answered, number, ContactResult.ENDED)
        else:
            answer, elsewhere = other.joins(launcher)
            if answer is ContactResult.FOLLOWED:
                launcher.seeker.tried(number, answer)
            else:
                self.later(0.01, None, launcher.answered, number, answer, elsewhere)

    # Workers and orders.

    def report(self, member: Member, kind: str, *args: object) -> None:
        launcher = self.launchers[int(member.site.name)]
        if launcher.lives:
            why = ("stopped",) if kind == "stalled" else ()
            launcher.report(kind, *(args if kind == "slots" else (member.uid, *args, *why)))

    def up(self, member: Member, message: FromWorker) -> None:
        if not self.launchers[int(member.site.name)].is_dead:
            super().up(member, message)

    def ended(self, member: Member, code: int) -> None:
        if not self.launchers[int(member.site.name)].is_dead:
            super().ended(member, code)

    def begins(self, site: Site) -> None:
        if not site.has_begun:
            site.has_begun = True
            for slot in range(site.slots):
                self.later(0.1, None, self.starts, site, slot)

    def told(self, member: Member, _: int, message: object) -> None:
        super().told(member, member.site.cuts, message)

    def ordered(self, launcher: Launcher, order: CoordinatorOrder) -> None:
        """A coordinator has issued an order."""
        if type(order) is SendOrder and type(order.message) is View:
            view = order.message
            if self.views.setdefault(view.generation, view) != view:
                raise Violation(f"two views have the number {view.generation}: {self.history()}")
            if self.terms.get(view.generation >> 32) is None:
                raise Violation(f"{view} has the term of nobody: {self.history()}")
            if self.splits_at_view and not view.is_planned:
                self.splits_at_view = False
                others = [each.site for each in self.launchers.values() if each is not launcher]
                self.cut([(launcher.site, each) for each in others], 2)
        if self.log is not None and isinstance(order, (NotifyOrder, SendOrder, EndOrder)):
            self.log.append(f"{self.now_s:9.4f} {launcher.number:8} ORDERS {order}")

    def elected(self, launcher: Launcher, term: int) -> None:
        """A launcher becomes the coordinator."""
        self.elections += 1
        self.elected_s.append(self.now_s)
        if self.cut_off is not None and self.cut_off is not launcher:
            self.after(0.4 * self.chance(), None, self.change_sides, self.cut_off, launcher)
            self.cut_off = None
        if self.terms.setdefault(term, launcher.number) != launcher.number:
            raise Violation(f"the term {term} has two coordinators: {self.history()}")
        if self.log is not None:
            self.log.append(f"{self.now_s:9.4f} ELECTED {launcher.number} {term}")

    def hands_over(self, launcher: Launcher) -> None:
        """The coordinating launcher has directed the others to its successor, and exits."""
        self.handed_over_s.append(self.now_s)
        for member in self.members.values():
            if member.state == "dead":
                continue
            if member.site is launcher.site:
                raise Violation(f"{member.uid} runs when its launcher has handed over; {self.history()}")
            if member.group is not None and member.group.view.store == str(launcher.number):
                self.stores_lost.append(member.uid)
        self.launcher_over(launcher, HANDED_OVER)

    def deserted(self, launcher: Launcher) -> None:
        """A launcher concludes that the job has ended."""
        if not launcher.account.is_done and any(each.lives for each in self.launchers.values() if each is not launcher):
            raise Violation(f"{launcher.number} thinks that all others have ended; {self.history()}")
        done = launcher.account.has_finished
        self.launcher_over(launcher, EndOrder(0) if done else EndOrder(1, "nobody listens any more"))

    def launcher_over(self, launcher: Launcher, end: EndOrder) -> None:
        """A launcher exits, with its workers."""
        if launcher.end is None:
            launcher.end = end
            self.launcher_goes(launcher)

    def launcher_goes(self, launcher: Launcher) -> None:
        for member in self.members.values():
            if member.site is launcher.site and member.state != "dead":
                member.state, member.code = "dead", -9
                member.leave_group()
        for link in launcher.followers.values():
            self.send_down(link, ConnectionLoss.ENDED)
        if launcher.link is not None:
            self.send_up(launcher.link, "end", ())

    # Faults.

    def strike(self, kind: str) -> None:
        random = self.random
        living = [each for each in self.members.values() if each.state != "dead"]
        up = [each for each in self.launchers.values() if each.lives]
        leaders = [each for each in up if each.coordinator is not None]
        if self.log is not None:
            self.log.append(f"{self.now_s:9.4f} FAULT {kind}")
        self.is_lasting |= kind in LASTING
        self.was_torn |= kind in TEARING
        if kind == "kill" and living:
            random.choice(living).exit(-9)
        elif kind == "kill newest" and living:
            living[-1].exit(-9)
        elif kind == "freeze" and living:
            freeze(self, random.choice(living), random.choice((0.5, 3.0, 8.0)))
        elif kind == "freeze machine" and living:
            site, for_s = random.choice(living).site, random.choice((3.0, 8.0))
            for each in living:
                if each.site is site:
                    freeze(self, each, for_s)
        elif kind == "leave" and living:
            random.choice(living).asked_to_leave()
        elif kind == "reset" and self.groups:
            self.groups[max(self.groups)].fail()
        elif kind == "split at view":
            self.splits_at_view = True
        elif kind in ("cut", "cut control") and len(up) > 1:
            one, other = random.sample(up, 2)
            self.cut([(one.site, other.site)], 2 if kind == "cut" else 1)
        elif kind == "split" and len(up) > 1:
            side = {each.site for each in up if self.chance() < 0.5}
            self.cut([(a.site, b.site) for a in up for b in up if a.site in side and b.site not in side], 2)
        elif kind == "reset links":
            for each in up:
                if each.link is not None and self.chance() < 0.5 and each.link.leader is not each:
                    self.reset(each.link)
        elif kind == "leave coordinator" and leaders:
            random.choice(leaders).leaves()
        elif kind == "crash coordinator" and leaders:
            self.crash(random.choice(leaders))
        elif kind == "restart":
            self.restart()
        elif kind == "change sides" and leaders:
            self.cut_off = leaders[0]
            self.cut([(leaders[0].site, each.site) for each in up if each is not leaders[0]], 2, 30.0)
        elif kind == "storm":
            self.reconnect(self.random.choice((0.0, 0.2, 0.5)), 25)
        elif kind == "crash" and up:
            self.crash(random.choice(up))
        elif kind == "power" and up:
            self.power(random.choice(up))
        elif kind == "shrink":
            random.choice([*self.sites.values()]).attempts = 0

    def change_sides(self, first: Launcher, later: Launcher) -> None:
        """A machine on the later coordinator's side loses its workers, then can reach only the first coordinator."""
        others = [each for each in self.launchers.values() if each.lives and each is not first]
        moved = self.random.choice([each for each in others if each is not later] or [later])
        for member in list(self.members.values()):
            if member.site is moved.site and member.state != "dead":
                member.exit(-9)
        self.cut([(moved.site, each.site) for each in others if each is not moved], 2)
        self.heal(frozenset((first.site.name, moved.site.name)))

    def crash(self, launcher: Launcher) -> None:
        """A launcher is killed with SIGKILL: its workers are killed, and the kernel closes its connections."""
        launcher.is_dead = True
        self.launcher_goes(launcher)

    def power(self, launcher: Launcher) -> None:
        """A machine loses power; no other machine is notified."""
        launcher.is_dead = launcher.site.is_isolated = True
        for member in self.members.values():
            if member.site is launcher.site and member.state != "dead":
                member.state = "dead"
                member.leave_group()
        for other in self.launchers.values():
            for link in [*other.followers.values(), *([other.link] if other.link is not None else [])]:
                if launcher in (link.leader, link.follower):
                    self.silence(link)

    def reset(self, link: Link) -> None:
        """The network resets a connection; messages in flight are lost."""
        link.is_open_below = False
        self.later(0.05, None, link.leader.drops, link, "reset")
        self.later(0.05, None, link.follower.lost, link, ConnectionLoss.RESET)

    def cut(self, pairs: list[tuple[Site, Site]], level: int, for_s: float = 0.0) -> None:
        for_s = for_s or self.random.choice((0.3, 1.0, 4.0, 20.0))
        for one, other in pairs:
            pair = frozenset((one.name, other.name))
            self.cuts[pair] = max(self.cuts.get(pair, 0), level)
            self.after(for_s, None, self.heal, pair)
        self.notice_cuts()

    def notice_cuts(self) -> None:
        """Breaks the groups of workers that can no longer reach each other, and starts the launchers' timeouts."""
        for group in self.groups.values():
            if not self.connects(group.arrived):
                group.fail()
        for launcher in self.launchers.values():
            for link in launcher.followers.values():
                if not self.reach(link.leader.site, link.follower.site):
                    self.silence(link)

    def reconnect(self, deaths: float, times: int) -> None:
        """Makes new pairs of machines unreachable and kills some workers, several times; finally heals all pairs."""
        self.cuts.clear()
        names = [each.site.name for each in self.launchers.values() if each.lives]
        is_split, side = self.chance() < 0.6, {name for name in names if self.chance() < 0.5}
        for at, one in enumerate(names):
            for other in names[:at] if times else ():
                if (one in side) != (other in side) if is_split else self.chance() < 0.25:
                    self.cuts[frozenset((one, other))] = 2 if self.chance() < 0.7 else 1
        self.notice_cuts()
        while self.chance() < deaths and (living := [each for each in self.members.values() if each.state != "dead"]):
            self.random.choice(living).exit(-9)
        if times:
            self.after(0.2 + 2.5 * self.chance(), None, self.reconnect, deaths, times - 1)

    def heal(self, pair: frozenset[str]) -> None:
        self.cuts.pop(pair, None)

    def silence(self, link: Link) -> None:
        """Each end considers the other lost, unless the connection has recovered."""
        self.at(self.now_s + SILENT_S + 0.5 * self.chance(), None, self.silent, link, True)
        self.at(self.now_s + SILENT_S + 0.5 * self.chance(), None, self.silent, link, False)

    def silent(self, link: Link, is_above: bool) -> None:
        """One end considers the other lost and closes the connection; the other end detects this."""
        if not self.reach(link.follower.site, link.leader.site):
            self.close_end(link, is_above)
            self.after(0.5 * self.chance(), None, self.close_end, link, not is_above)

    def close_end(self, link: Link, is_above: bool) -> None:
        if not is_above:
            link.follower.lost(link, ConnectionLoss.SILENT)
        elif link.leader.lives and link.is_open_above:
            link.leader.drops(link, "silence")
            self.send_down(link, ConnectionLoss.DROPPED)

    # Ends.

    def check_ends(self) -> None:
        """Checks how the launchers that were not killed ended."""
        ends = [each.end for each in self.launchers.values() if each.end not in (None, HANDED_OVER)]
        if not ends:
            return
        done = len(self.results) == self.rounds
        for end in ends:
            if end.code == 0 and not (done and any(each.has_finished for each in self.members.values())):
                raise Violation(f"the job ends with 0: {self.history()}")
        if any(end.code == 0 for end in ends) or self.is_lasting:
            return
        reasons = {end.reason for end in ends}
        lost = any("state is lost" in each or "left before" in each or "asked to" in each for each in reasons)
        few = any("are left" in each or "are ready" in each for each in reasons)
        torn = self.was_torn and any("without a round in between" in each for each in reasons)
        lone = any("before the first view" in each or "no rendezvous" in each for each in reasons)
        if lost and not any(each.round != NO_STATE and each.state not in ("dead",) for each in self.members.values()):
            return
        if not (
            lost
            or few
            or lone
            or torn
            or any("After its last round" in each or "After the last round" in each for each in reasons)
        ):
            raise Violation(f"all machines live, and the job ends badly: {reasons}; {self.history()}")


def _brief(args: tuple[object, ...]) -> str:
    return " ".join(
        f"{each.follower.number}>{each.leader.number}"
        if isinstance(each, Link)
        else str(each.view.generation)
        if isinstance(each, Group)
        else str(each)[:200]
        for each in args
        if not isinstance(each, Launcher)
    )
