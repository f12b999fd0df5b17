"""A model of state transfers: senders take snapshots and log results, and a late worker (receiver) replays them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_model.members import NO_STATE, Member, Violation
from paceline.train.elastic.protocol import CaughtUp, StateTransfer, TransferOffer, TransferReady, View, WorkerReady

if TYPE_CHECKING:
    from elastic_model.world import World

Item = tuple[str, int, int, tuple[str, ...]]  # "result", a round and its digest, or "entered", a round and a view


class Log:
    """The data that a sender serves: a state and the subsequent events."""

    __slots__ = ("digest", "items", "round")

    def __init__(self, member: Member) -> None:
        self.round, self.digest = member.round, member.digest
        self.items: list[Item] = []

    def next(self, round_: int, generation: int) -> Item | None:
        """Returns the next item for a receiver."""
        for item in self.items:
            if item[1] == round_ and (item[0] == "result" or item[2] > generation):
                return item
        return None


def begin_transfers(member: Member, agreed: int) -> None:
    """At the beginning of a batch, a member starts the transfers whose announcements all members have received."""
    world = member.world
    for transfer in [each for each in member.transfers if each.number <= agreed]:
        member.transfers.remove(transfer)
        address = "" if world.chance() < 0.02 else member.uid
        if address:
            member.logs[transfer.number] = Log(member)
        world.up(member, TransferReady(transfer.number, member.round, address))


def log_all(member: Member, item: Item) -> None:
    """A sender logs an event."""
    for log in member.logs.values():
        log.items.append(item)


class Learner:
    """The receiving part of a member."""

    __slots__ = ("generation", "has_said", "member", "offers", "transfer", "view", "world")

    def __init__(self, world: World, member: Member) -> None:
        self.world, self.member = world, member
        self.transfer = 0
        self.offers: list[str] = []
        self.generation = 0  # the last view that it has seen the other members enter
        self.view = 0  # the view that it enters
        self.has_said = False

    def offered(self, offer: TransferOffer) -> None:
        """Processes the offer of a sender."""
        member = self.member
        if offer.transfer > self.transfer and member.state == "ready" and member.round == NO_STATE:
            self.transfer, self.offers, self.has_said = offer.transfer, [], False
            member.state = "learning"
            self.world.later(self.world.copy_s, member, self.received, offer.transfer)
        if offer.transfer == self.transfer and offer.address not in self.offers:
            self.offers.append(offer.address)

    def senders(self) -> list[Log]:
        """Returns the logs of the reachable senders, and removes the logs of the other senders."""
        world, found = self.world, []
        for uid in list(self.offers):
            sender = world.members[uid]
            if sender.state != "dead" and self.transfer in sender.logs and world.connects([uid, self.member.uid]):
                found.append(sender.logs[self.transfer])
            else:
                self.offers.remove(uid)
        return found

    def received(self, transfer: int) -> None:
        """The learner has received the state. If no sender is left, it waits for another transfer."""
        member = self.member
        if member.state != "learning" or transfer != self.transfer:
            return
        logs = self.senders()
        if not logs:
            member.state = "ready"
            self.world.up(member, WorkerReady(member.site.fingerprint, True, self.transfer))
            return
        first = logs[0]
        if first.round % self.world.batch:
            raise Violation(f"{member.uid} is given the state in the middle of a batch; {self.world.history()}")
        member.state, member.round, member.digest, member.is_receiver = "following", first.round, first.digest, True
        self.follow()

    def follow(self) -> None:
        """Replays the next event of the other members."""
        member, world = self.member, self.world
        if member.state != "following":
            return
        logs = self.senders()
        item = next((found for log in logs if (found := log.next(member.round, self.generation))), None)
        if not logs:
            world.later(0.5, member, self.gives_up)
        elif item is None:
            if not self.has_said:
                self.has_said = True
                world.up(member, CaughtUp(member.round))
            world.after(0.01, member, self.follow)
        elif item[0] == "result":
            if world.results[item[1]] != item[2]:
                raise Violation(f"{member.uid} replays another result of round {item[1]}; {world.history()}")
            member.round, member.digest = member.round + 1, item[2]
            world.later(0.05 * world.slowness_of_replay, member, self.follow)
        else:
            self.generation, self.has_said = item[2], False
            if member.uid in item[3]:
                self.view = item[2]
                member.state = "called"
                self.come_in()
            else:
                self.follow()

    def come_in(self) -> None:
        """Joins the view of the other members once this worker has received it; skips views that have failed."""
        member = self.member
        latest = member.latest
        if member.state != "called" or latest is None or latest.generation < self.view:
            return
        known = [each for each in member.known if each.generation == self.view or not each.is_planned]
        view = max((each for each in known if each.generation >= self.view), default=None, key=_generation)
        if view is None:
            return
        if member.uid in view.members:
            self.view = view.generation
            member.enter(view)
        else:
            member.state = "following"
            self.follow()

    def broke(self, generation: int) -> None:
        """The view that the learner entered has failed."""
        self.view = generation + 1
        self.member.state = "called"
        self.come_in()

    def gives_up(self) -> None:
        """No sender is left: the worker exits and is replaced."""
        if self.member.state == "following":
            self.member.exit(75)


def _generation(view: View) -> int:
    return view.generation


def receive_transfer(member: Member, transfer: StateTransfer) -> None:
    """A member receives the announcement of a transfer."""
    if transfer.number > member.latest_transfer:
        member.latest_transfer = transfer.number
        member.heard = max(member.heard, transfer.number)
        if member.uid in transfer.senders:
            member.transfers.append(transfer)
