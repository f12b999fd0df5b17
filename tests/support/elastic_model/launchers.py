"""A model of a machine's launcher, which follows a coordinator, seeks one, is a candidate, or coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_model.faults import current_of, fenced
from elastic_model.members import Site
from paceline.operate.launch.elastic.machine_log import MachineState
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.election import (
    Candidacy,
    ConnectionLoss,
    ContactResult,
    CoordinatorSearch,
    JobDeserted,
    Pause,
    StopSearch,
    TryMachine,
    merge_reports,
)
from paceline.train.elastic.protocol import (
    CloseSlotsOrder,
    CoordinatorOrder,
    EndOrder,
    FenceStalledOrder,
    HandoverOrder,
    ReplicateOrder,
    SendOrder,
    StartOrder,
    View,
    next_term,
)

if TYPE_CHECKING:
    from elastic_model.realm import Realm

SEEKS_S = 120.0


@dataclass(eq=False)
class Link:
    """The connection of a launcher to its leader. Each side detects separately that the connection has been closed."""

    follower: Launcher
    leader: Launcher
    up_s: float = 0.0  # arrival time of the last message that was sent
    down_s: float = 0.0
    is_open_above: bool = True
    is_open_below: bool = True
    leads: bool = False  # the leader has reported a coordinator to the follower


@dataclass(eq=False)
class Launcher:
    """A launcher; `site` is its machine."""

    realm: Realm
    site: Site
    account: MachineState
    seeker: CoordinatorSearch
    link: Link | None = None  # the connection to the leader
    is_dead: bool = False
    end: EndOrder | None = None
    coordinator: Coordinator | None = None
    candidacy: Candidacy | None = None
    followers: dict[int, Link] = field(default_factory=dict)
    waiting: list[tuple[Link, str, tuple[Any, ...]]] = field(default_factory=list)  # reports held until the election
    ticking_s: float | None = None
    candidacies: int = 0

    @property
    def number(self) -> int:
        return self.account.number

    @property
    def lives(self) -> bool:
        return not self.is_dead and self.end is None

    # The follower's side.

    def report(self, kind: str, *args: Any) -> None:
        """Records an event and reports it to the coordinator."""
        note = {"started": "started", "said": "record_message", "stalled": "stalled", "ended": "ended"}.get(kind)
        if note is not None:
            getattr(self.account, note)(*args)
        elif kind == "slots":
            self.account.slots = int(args[0])
        elif kind == "leaves":
            self.account.is_leaving = True
        if self.link is not None:
            self.realm.send_up(self.link, kind, args)

    def hears(self, link: Link, order: CoordinatorOrder) -> None:
        """Processes an order; orders from launchers other than the leader are ignored."""
        if self.link is not link or not self.lives:
            return
        if type(order) is ReplicateOrder:
            self.account.merge(order.job_state)
            self.seeker.found()
            link.leads = True
            if order.job_state.views:
                self.realm.send_up(link, "knows", (order.job_state.views[-1].generation,))
        elif type(order) is SendOrder:
            if type(order.message) is View:
                self.account.passes_on(order.message)
            member = self.realm.members[order.uid]
            self.realm.later(0.001, None, self.realm.told, member, 0, order.message)
        elif type(order) is StartOrder:
            self.realm.begins(self.site)
        elif type(order) is FenceStalledOrder:
            leader = link.leader.coordinator
            fenced(self.realm.members[order.uid], current_of(leader) if leader is not None else ())
        elif type(order) is CloseSlotsOrder:
            self.site.replaces = False
        elif type(order) is HandoverOrder:
            self.link, link.is_open_below = None, False
            self.realm.send_up(link, "away", ())
            self.seeker.handed_over(order.to, self.realm.now_s)
            self.seek()
        elif type(order) is EndOrder:
            self.realm.launcher_over(self, order)

    def leaves(self) -> None:
        """Handles SIGTERM: the workers leave, and then the launcher leaves."""
        if self.account.is_leaving:
            return
        self.site.replaces, self.site.slots = False, 0
        self.report("slots", 0)
        self.report("leaves")
        for member in list(self.realm.members.values()):
            if member.site is self.site:
                member.asked_to_leave()

    def lost(self, link: Link, loss: ConnectionLoss) -> None:
        """The connection to the leader has been closed."""
        if self.link is not link or not self.lives:
            return
        self.link = None
        link.is_open_below = False
        if not link.leads and loss in (ConnectionLoss.ENDED, ConnectionLoss.RESET):
            loss = ConnectionLoss.SILENT  # it may have sent orders that did not arrive here
        was_seeking = self.seeker.is_seeking
        self.seeker.lost(link.leader.number, loss, self.realm.now_s)
        if not self.account.job_state.views and not was_seeking:
            self.realm.launcher_over(self, EndOrder(1, "lost before the first view"))
            return
        self.realm.after(0.0, None, self.seek)

    def seek(self) -> None:
        """Performs the next step of the search for a coordinator."""
        if self.link is not None or not self.lives:
            return
        known = self.account.job_state
        peers = [peer.number for peer in known.peers if peer.number not in known.ended]
        match self.seeker.next(peers, self.realm.now_s, is_done=self.account.is_done):
            case StopSearch():
                self.realm.launcher_over(self, EndOrder(1, "nobody coordinates"))
            case JobDeserted():
                self.realm.deserted(self)
            case Pause(for_s):
                self.realm.after(for_s, None, self.seek)
            case TryMachine(number, stand_s):
                if number == self.number and self.coordinator is None:
                    self.stand(stand_s)
                self.realm.dial(self, number)

    def answered(self, number: int, answer: ContactResult, elsewhere: int | None = None) -> None:
        """A connection attempt has failed."""
        if self.lives and self.link is None:
            if self.seeker.tried(number, answer, elsewhere):
                self.account.machine_ended(number)
            self.seek()

    # The leader's side.

    def stand(self, for_s: float) -> None:
        """Becomes a candidate that other launchers can follow."""
        self.candidacies += 1
        self.candidacy = Candidacy(self.realm.now_s, self.realm.now_s + for_s)
        self.realm.after(for_s, None, self.consider, self.candidacies)

    def consider(self, candidacy: int) -> None:
        """Completes the election, or gives up at the deadline."""
        if self.candidacy is None or not self.lives or candidacy != self.candidacies:
            return
        now_s = self.realm.now_s
        if self.candidacy.is_elected(now_s):
            self.coordinate()
        elif self.candidacy.has_enough:
            self.realm.at(self.candidacy.deadline_s, None, self.consider, candidacy)
        elif now_s >= self.candidacy.until_s:
            self.drop_all()

    def coordinate(self) -> None:
        """Becomes the coordinator."""
        assert self.candidacy is not None
        reports = list(self.candidacy.reports.values())
        self.candidacy = None
        realm, known = self.realm, merge_reports(reports)
        term = next_term(known.term, self.number)
        realm.elected(self, term)
        policy, home = realm.policy, str(self.number)
        self.coordinator = Coordinator(policy, realm.now_s, term, home=home, store=home)
        waiting, self.waiting = self.waiting, []
        stores = {each.number: str(each.number) for each in reports}
        self.obey(self.coordinator.resume(reports, realm.now_s, stores=stores))
        for link, kind, args in waiting:
            self.takes(link, kind, args)

    def joins(self, follower: Launcher) -> tuple[ContactResult, int | None]:
        """Handles another launcher's request to follow this one."""
        retirement = self.coordinator.retirement if self.coordinator is not None else None
        if retirement is not None and retirement.has_resigned:
            assert retirement.successor is not None
            return ContactResult.ELSEWHERE, int(retirement.successor.name)
        if self.coordinator is None and self.candidacy is None:
            leader = self.link.leader.number if self.link is not None else None
            return (
                ContactResult.SEEKING if leader is None or self.seeker.is_seeking else ContactResult.ELSEWHERE
            ), leader
        before = self.followers.get(follower.number)
        if before is not None:
            before.is_open_above = False
        link = follower.link = self.followers[follower.number] = Link(follower, self)
        now_s = self.realm.now_s
        if self.coordinator is not None:
            told = follower.account.report()
            self.obey(self.coordinator.machine_returned(told, now_s, f"to-{told.number}", str(told.number)))
        else:
            assert self.candidacy is not None
            self.candidacy.follows(follower.account.report(), now_s)
            self.realm.after(0.0, None, self.consider, self.candidacies)
        assert link is follower.link
        return ContactResult.FOLLOWED, None

    def takes(self, link: Link, kind: str, args: tuple[Any, ...]) -> None:
        """Processes a follower's report."""
        if not self.lives or not link.is_open_above:
            return
        if self.candidacy is not None:
            self.waiting.append((link, kind, args))
            return
        coordinator, name, now_s = self.coordinator, link.follower.site.name, self.realm.now_s
        if coordinator is None:
            return
        if kind == "said":
            self.obey(coordinator.handle_worker_message(args[0], args[1], now_s))
        elif kind == "started":
            self.obey(coordinator.worker_started(args[0], name, now_s))
        elif kind == "ended":
            self.realm.reported_dead.add(args[0])
            self.obey(coordinator.worker_ended(*args, now_s))
        elif kind == "stalled":
            self.obey(coordinator.worker_stalled(*args, now_s))
        elif kind == "knows":
            self.obey(coordinator.machine_replicated(name, args[0], now_s))
        elif kind == "slots":
            self.obey(coordinator.slots_changed(name, args[0], now_s))
        elif kind == "leaves":
            self.obey(coordinator.machine_leaves(name, now_s))

    def drops(self, link: Link, why: str, *, has_ended: bool = False) -> None:
        """Closes this launcher's end of a follower's connection."""
        if not link.is_open_above:
            return
        link.is_open_above = False
        name = link.follower.site.name
        if self.followers.get(link.follower.number) is link:
            del self.followers[link.follower.number]
            if self.candidacy is not None:
                self.candidacy.left(link.follower.number, self.realm.now_s)
            elif self.coordinator is not None and self.lives:
                noticed = self.coordinator.machine_left if has_ended else self.coordinator.machine_lost
                self.obey(noticed(name, why, self.realm.now_s))

    def drop_all(self) -> None:
        """Stops coordinating or being a candidate, and drops all followers."""
        self.candidacy = self.coordinator = None
        self.waiting = []
        followers, self.followers = list(self.followers.values()), {}
        for link in followers:
            link.is_open_above = False
            self.realm.send_down(link, ConnectionLoss.DROPPED)

    def obey(self, orders: list[CoordinatorOrder]) -> None:
        """Sends the coordinator's orders."""
        realm = self.realm
        for order in orders:
            realm.ordered(self, order)
            if isinstance(order, EndOrder):
                for link in list(self.followers.values()):
                    realm.send_down(link, order)
            elif isinstance(order, HandoverOrder) and int(order.machine) == self.number:
                realm.hands_over(self)
                return
            elif isinstance(
                order, (SendOrder, ReplicateOrder, StartOrder, HandoverOrder, FenceStalledOrder, CloseSlotsOrder)
            ):
                link = self.followers.get(int(order.machine))
                if link is not None:
                    realm.send_down(link, order)
        due_s = self.coordinator.deadline_s if self.coordinator is not None else None
        if due_s is not None and due_s != self.ticking_s:
            self.ticking_s = due_s
            realm.at(max(due_s, realm.now_s), None, self.tick, due_s)
        if self.coordinator is not None and self.coordinator.resigns_s is not None:
            realm.at(max(self.coordinator.resigns_s, realm.now_s), None, self.resign)

    def tick(self, due_s: float) -> None:
        """Calls the coordinator's `tick`."""
        if self.ticking_s == due_s and self.lives and self.coordinator is not None:
            self.ticking_s = None
            self.obey(self.coordinator.tick(self.realm.now_s))

    def resign(self) -> None:
        """Stops coordinating, because there is no quorum or another coordinator has taken over."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.resigns_s is None or not self.lives:
            return
        if self.realm.now_s >= coordinator.resigns_s:
            self.realm.superseded += coordinator._is_superseded
            self.drop_all()
