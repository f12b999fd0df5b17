"""How a worker that comes late learns: donors take snapshots and log results, and the learner follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_model.members import NO_STATE, Member, Violation
from paceline.elastic.messages import Donating, Learn, Learned, Lesson, Ready, View

if TYPE_CHECKING:
    from elastic_model.world import World

Item = tuple[str, int, int, tuple[str, ...]]  # "result", a round and its digest; or "entered", a round and a view


class Log:
    """What a donor serves: a state, and what happened since."""

    __slots__ = ("digest", "items", "round")

    def __init__(self, member: Member) -> None:
        self.round, self.digest = member.round, member.digest
        self.items: list[Item] = []

    def next(self, round_: int, generation: int) -> Item | None:
        """Returns what comes next for a learner."""
        for item in self.items:
            if item[1] == round_ and (item[0] == "result" or item[2] > generation):
                return item
        return None


def begin_lessons(member: Member, agreed: int) -> None:
    """A member is at the beginning of a batch, and begins the lessons that all have heard of."""
    world = member.world
    for lesson in [each for each in member.lessons if each.number <= agreed]:
        member.lessons.remove(lesson)
        address = "" if world.chance() < 0.02 else member.uid
        if address:
            member.logs[lesson.number] = Log(member)
        world.up(member, Donating(lesson.number, member.round, address))


def log_all(member: Member, item: Item) -> None:
    """A donor logs what happens."""
    for log in member.logs.values():
        log.items.append(item)


class Learner:
    """The part of a member that learns."""

    __slots__ = ("generation", "has_said", "lesson", "member", "offers", "view", "world")

    def __init__(self, world: World, member: Member) -> None:
        self.world, self.member = world, member
        self.lesson = 0
        self.offers: list[str] = []
        self.generation = 0  # the last view that it has seen the others enter
        self.view = 0  # the view that it enters
        self.has_said = False

    def offered(self, offer: Learn) -> None:
        """A donor serves it."""
        member = self.member
        if offer.lesson > self.lesson and member.state == "ready" and member.round == NO_STATE:
            self.lesson, self.offers, self.has_said = offer.lesson, [], False
            member.state = "learning"
            self.world.later(self.world.copy_s, member, self.taught, offer.lesson)
        if offer.lesson == self.lesson and offer.address not in self.offers:
            self.offers.append(offer.address)

    def donors(self) -> list[Log]:
        """Returns the logs of the donors that it reaches; the others are lost to it."""
        world, found = self.world, []
        for uid in list(self.offers):
            donor = world.members[uid]
            if donor.state != "dead" and self.lesson in donor.logs and world.connects([uid, self.member.uid]):
                found.append(donor.logs[self.lesson])
            else:
                self.offers.remove(uid)
        return found

    def taught(self, lesson: int) -> None:
        """Has got the state, if a donor is left."""
        member = self.member
        if member.state != "learning" or lesson != self.lesson:
            return
        logs = self.donors()
        if not logs:
            member.state = "ready"
            self.world.up(member, Ready(member.site.fingerprint, True, self.lesson))
            return
        first = logs[0]
        if first.round % self.world.batch:
            raise Violation(f"{member.uid} is given the state in the middle of a batch; {self.world.story()}")
        member.state, member.round, member.digest, member.is_learner = "following", first.round, first.digest, True
        self.follow()

    def follow(self) -> None:
        """Does what the others did next."""
        member, world = self.member, self.world
        if member.state != "following":
            return
        logs = self.donors()
        item = next((found for log in logs if (found := log.next(member.round, self.generation))), None)
        if not logs:
            world.later(0.5, member, self.gives_up)
        elif item is None:
            if not self.has_said:
                self.has_said = True
                world.up(member, Learned(member.round))
            world.after(0.01, member, self.follow)
        elif item[0] == "result":
            if world.results[item[1]] != item[2]:
                raise Violation(f"{member.uid} replays another result of round {item[1]}; {world.story()}")
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
        """Enters the view that the others have entered, when it has heard of it, unless it broke meanwhile."""
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
        """The view that it entered broke."""
        self.view = generation + 1
        self.member.state = "called"
        self.come_in()

    def gives_up(self) -> None:
        """No donor is left: another worker will begin again."""
        if self.member.state == "following":
            self.member.exit(75)


def _generation(view: View) -> int:
    return view.generation


def hear_lesson(member: Member, lesson: Lesson) -> None:
    """A member hears of a lesson."""
    if lesson.number > member.latest_lesson:
        member.latest_lesson = lesson.number
        member.heard = max(member.heard, lesson.number)
        if member.uid in lesson.donors:
            member.lessons.append(lesson)
