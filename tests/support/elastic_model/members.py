"""A model of a worker as the coordinator sees it: it follows views, and its rounds only extend a chain of hashes.

A worker's state is (rounds committed, digest); -1 rounds means no state. A group represents the connections between the
members of one view. It forms when all members have arrived, and breaks when one is lost. A round commits once all
members have contributed to it, at a different time on each member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.operate.launch.elastic.machine_log import ReplayableMessages
from paceline.train.elastic.protocol import (
    ExitRequest,
    LeaveNotice,
    LoopFinished,
    StateTransfer,
    ToWorker,
    TransferOffer,
    View,
    ViewFailed,
    ViewInstalled,
    WaitNotice,
    WorkerReady,
)

if TYPE_CHECKING:
    from elastic_model.receivers import Log
    from elastic_model.world import World

NO_STATE = -1
FORMING_S = 4.0  # how long a member waits for the others


class Violation(AssertionError):
    """An invariant has been violated."""


class Group:
    """The connections of one view."""

    __slots__ = ("arrived", "contributions", "formed", "has_failed", "is_inside", "top", "view", "world")

    def __init__(self, world: World, view: View) -> None:
        self.world, self.view = world, view
        self.arrived: dict[str, Member] = {}
        self.contributions: dict[int, dict[str, int]] = {}
        self.has_failed = False
        self.formed = 0
        self.top = NO_STATE
        self.is_inside = False  # some member has begun the next batch

    def arrive(self, member: Member) -> None:
        """Registers a member. When all have arrived, each takes over the newest state."""
        self.arrived[member.uid] = member
        if self.has_failed or len(self.arrived) < len(self.view.members) or not self.world.connects(self.arrived):
            return
        self.top = max(each.round for each in self.arrived.values())
        for each in self.arrived.values():
            if each.is_receiver and each.round != self.top:
                raise Violation(f"{each.uid} comes in with round {each.round}, and the others have {self.top}")
        self.is_inside = any(each.is_inside and each.round == self.top for each in self.arrived.values())
        for each in self.arrived.values():
            most_s = self.world.copy_s if each.round == NO_STATE else 0.03
            self.world.later(most_s, each, each.formed, self)
        if self.world.is_cursed:
            self.fail()

    def contribute(self, member: Member) -> None:
        """Registers a member's part of a round; the last part completes the round."""
        parts = self.contributions.setdefault(member.round, {})
        parts[member.uid] = member.ready
        if len(parts) < len(self.view.members) or not self.world.connects(self.arrived):
            return
        ready = min(parts.values()) if self.world.agrees_on_views else 0
        for each in self.arrived.values():
            self.world.later(0.03, each, each.commit, self, member.round, ready)

    def fail(self) -> None:
        """Registers the loss of a member. The other members detect the loss."""
        if not self.has_failed:
            self.has_failed = True
            for each in self.arrived.values():
                self.world.later(0.06, each, each.broke, self, "a peer is gone")

    def holder(self, but: Member) -> Member | None:
        """Returns a member that has the newest state and can still send it."""
        if self.has_failed:
            return None
        return next((each for each in self.arrived.values() if each is not but and each.round == self.top), None)


class Site:
    """A machine and its launcher."""

    __slots__ = (
        *("attempts", "cuts", "fingerprint", "has_begun", "is_cut", "is_gone", "is_isolated", "is_known_lost", "name"),
        *("replaces", "slots"),
    )  # fmt: skip

    def __init__(self, name: str, slots: int, attempts: int) -> None:
        self.name, self.slots, self.attempts = name, slots, attempts
        self.fingerprint = "same"
        self.has_begun = self.is_gone = False
        self.replaces = True
        self.is_cut = False  # from the coordinator
        self.is_isolated = False  # from all other machines too
        self.is_known_lost = False  # to the coordinator
        self.cuts = 0


class Member:
    """A worker process."""

    __slots__ = (
        *("backlog", "code", "coming", "digest", "group", "has_finished", "heard", "is_frozen", "is_leaving"),
        *("is_inside", "is_receiver", "known", "lag", "last_down_s", "last_up_s", "latest", "latest_transfer"),
        *("receiver", "transfers", "logs"),
        *("number", "round", "site", "slot", "standing", "state", "uid", "was_stalled", "world"),
    )  # fmt: skip

    def __init__(self, world: World, number: int, site: Site, slot: int) -> None:
        self.world, self.number, self.site, self.slot = world, number, site, slot
        self.uid = f"{site.name}.{slot}.{number}"
        self.state = "boot"  # boot, ready, learning, following, called, forming, working, idle, broken, done, dead
        self.round, self.digest = NO_STATE, 0
        self.group: Group | None = None
        self.heard = 0  # the largest number of a received view or transfer
        self.coming = 0  # the number of a planned view to which this worker is connecting in advance
        self.latest: View | None = None
        self.known: list[View] = []
        self.is_receiver = False  # it has received the state, but is not in a view yet
        self.receiver = world.receiver(self)
        self.latest_transfer = 0
        self.transfers: list[StateTransfer] = []  # transfers that it must start
        self.logs: dict[int, Log] = {}
        self.is_inside = False  # it has begun the batch that starts with the next round
        self.code = 0
        self.has_finished = self.is_leaving = self.is_frozen = self.was_stalled = False
        self.backlog: list[tuple[object, tuple[object, ...]]] = []
        self.lag = 1.0
        self.last_up_s = self.last_down_s = 0.0
        self.standing = ReplayableMessages()

    def booted(self) -> None:
        """The script has reached its training loop."""
        if self.state == "boot":
            self.state = "ready"
            self.world.up(self, WorkerReady(self.site.fingerprint, self.world.can_catch_up))

    def hear(self, message: ToWorker) -> None:
        """Processes a message from the coordinator."""
        if self.state in ("dead", "done", "boot") or isinstance(message, WaitNotice):
            return
        if isinstance(message, ExitRequest):
            self.exit(message.code)
            return
        if isinstance(message, StateTransfer):
            self.world.receive_transfer(self, message)
            return
        if isinstance(message, TransferOffer):
            self.receiver.offered(message)
            return
        if self.latest is not None and message.generation <= self.latest.generation:
            return
        self.heard, self.latest, self.coming = max(self.heard, message.generation), message, 0
        if message.is_planned and self.uid in message.members:
            self.coming = message.generation
            self.world.later(0.3, self, self.prepared, message.generation)
        self.known = [*self.known[-3:], message]
        if self.state in ("following", "called"):
            if not self.world.waits_for_the_log and self.uid in message.members:
                self.enter(message)
            self.receiver.come_in()
        elif self.uid in message.members:
            if self.is_receiver and self.state == "forming":
                if self.group is not None and not message.is_planned:
                    self.broke(self.group, "there is a later view")
            elif not message.is_planned or self.state in ("ready", "idle") or self.round == NO_STATE:
                self.enter(message)
        elif self.is_receiver:
            if self.group is not None and not message.is_planned:
                self.broke(self.group, "there is a later view")
        elif self.is_leaving:
            if not message.is_planned or self.state != "working":
                self.exit(0)
        elif self.world.left_out_ends and self.round == NO_STATE:
            if self.group is not None and not message.is_planned:
                self.broke(self.group, "there is a later view")
        elif self.world.left_out_ends:
            self.exit(75)
        else:
            self.leave_group()
            self.state, self.round, self.is_inside = "ready", NO_STATE, False
            self.is_receiver, self.logs, self.transfers = False, {}, []
            self.world.up(self, WorkerReady(self.site.fingerprint, self.world.can_catch_up, self.receiver.transfer))

    def prepared(self, generation: int) -> None:
        """The member has connected to the members of a planned view, or has stopped waiting for them."""
        if self.coming == generation:
            self.coming = 0

    @property
    def ready(self) -> int:
        """The largest number among received views and transfers on which the member can act immediately."""
        return self.group.view.generation if self.coming and self.group is not None else self.heard

    def enter(self, view: View) -> None:
        """Connects to the members of a view."""
        self.world.log_all(self, ("entered", self.round, view.generation, view.members))
        self.leave_group(is_agreed=view.is_planned)
        self.state = "forming"
        self.group = self.world.group(view)
        self.world.after(FORMING_S, self, self.timed_out, self.group)
        self.group.arrive(self)

    def timed_out(self, group: Group) -> None:
        """Not all members have arrived in time."""
        if self.state == "forming":
            self.broke(group, "not all members came")

    def formed(self, group: Group) -> None:
        """Takes over the newest state and starts, because all members have arrived."""
        if self.group is not group or self.state != "forming":
            return
        top = group.top
        if top == NO_STATE:
            source = group.arrived[group.view.members[0]]
            if source is not self and group.has_failed:
                self.broke(group, "the source of the first state is gone")
                return
            self.digest = hash((source.number, group.view.generation))  # random, like the weights of a new model
        elif self.round < top:
            self.take_state(group)
            if self.round < top:
                self.broke(group, "nobody gives the state")
                return
        self.round = max(top, 0)
        group.formed += 1
        if group.formed == len(group.view.members):
            self.world.last_formed = group.view
            for each in group.arrived.values():
                self.world.later(0.02, each, each.installed, group)

    def take_state(self, group: Group) -> None:
        """Copies the state, or the result of the last round, from a live member that has it."""
        source, top = group.holder(self), group.top
        if source is None:
            return
        if NO_STATE < self.round < top - 1:
            raise Violation(f"{self.uid} has {self.round} rounds and {source.uid} has {top}: not one apart")
        if self.round == NO_STATE and (top % self.world.batch or group.is_inside):
            raise Violation(f"{self.uid} comes in after round {top}, in the middle of a batch; {self.world.history()}")
        is_late = self.round != NO_STATE
        self.digest, self.round, self.is_inside = source.digest, top, False
        if is_late:  # it commits the result for which it voted, and receivers get this result from its log
            self.world.log_all(self, ("result", top - 1, self.digest, ()))

    def installed(self, group: Group) -> None:
        """All members have the state."""
        if self.group is group and self.state == "forming":
            self.is_receiver = False
            self.world.up(self, ViewInstalled(group.view.generation, self.round))
            self.begin_round()

    def begin_round(self) -> None:
        """Starts the next round, unless the view has too few members for another batch."""
        group, world = self.group, self.world
        at_batch = self.round % world.batch == 0 and self.round < world.rounds
        if group.view.must_wait and at_batch and not group.is_inside:
            self.state = "idle"
            if (view := self.planned_until(self.heard, group)) is not None:
                self.follow_to(view)
            return
        self.state, self.is_inside = "working", at_batch
        world.later(0.05, self, self.contribute, group, self.round)

    def contribute(self, group: Group, round_: int) -> None:
        """The member has computed its part of the round."""
        if self.group is group and self.state == "working" and self.round == round_:
            group.contribute(self)

    def commit(self, group: Group, round_: int, ready: int) -> None:
        """All parts and headers have arrived."""
        world = self.world
        if self.group is not group or self.state != "working" or self.round != round_:
            return
        if round_ == world.rounds:
            self.state = "done"
            self.has_finished = True
            self.leave_group(is_agreed=True)
            world.up(self, LoopFinished(round_))
            world.later(0.2, self, self.exit, 1 if world.chance() < 0.001 else 0)
            return
        self.digest = hash((self.digest, round_))
        self.round += 1
        self.is_inside = group.is_inside = False
        world.committed(self, round_)
        world.log_all(self, ("result", round_, self.digest, ()))
        at_batch = self.round % world.batch == 0 and self.round < world.rounds
        if not world.agrees_on_views:
            ready = self.heard
        if at_batch or not world.snapshots_at_batches:
            world.begin_transfers(self, ready)
        if at_batch and (view := self.planned_until(ready, group)) is not None:
            self.follow_to(view)
        else:
            self.begin_round()

    def planned_until(self, number: int, group: Group) -> View | None:
        """Returns the latest known view that is newer than the group's and has at most this number."""
        later = [each for each in self.known if group.view.generation < each.generation <= number]
        return later[-1] if later else None

    def follow_to(self, view: View) -> None:
        """Enters the planned view; a worker that is not a member of the view exits."""
        if self.uid in view.members:
            self.enter(view)
        else:
            self.leave_group(is_agreed=True)
            self.exit(0)

    def broke(self, group: Group, reason: str) -> None:
        """The connections of the view are lost. A worker that waits between two batches does not detect this."""
        if self.group is not group or self.state not in ("forming", "working"):
            return
        self.leave_group()
        self.state = "broken"
        self.world.up(self, ViewFailed(group.view.generation, self.round, reason))
        if self.is_receiver:
            self.receiver.broke(group.view.generation)
            return
        if self.is_leaving and self.latest is not None and self.uid not in self.latest.members:
            self.exit(0)

    def asked_to_leave(self) -> None:
        """The process receives a SIGTERM."""
        if self.state == "boot":
            self.exit(-15)
        elif self.state not in ("dead", "done") and not self.is_leaving:
            self.is_leaving = True
            self.world.up(self, LeaveNotice("SIGTERM"))

    def exit(self, code: int) -> None:
        """The process exits or is killed."""
        if self.state != "dead":
            self.state, self.code = "dead", code
            self.leave_group()
            self.world.ended(self, code)

    def leave_group(self, *, is_agreed: bool = False) -> None:
        """Leaves the view's group, which fails if the exit was not agreed upon or the world is `is_rude`."""
        group, self.group = self.group, None
        if group is not None and (not is_agreed or self.world.is_rude):
            group.fail()
