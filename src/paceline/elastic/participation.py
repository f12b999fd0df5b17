"""How a worker takes part: it gets the state, enters views one after the other, and ends when it is not in the next.

`agreement.py` says what follows from what the members of a view tell each other when they enter it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from paceline.elastic.agreement import FRESH, NOTHING_AGREED, Agreement, Status, agree
from paceline.elastic.connection import LauncherConnection
from paceline.elastic.dealings import Dealt
from paceline.elastic.failpoints import reach
from paceline.elastic.handing_over import HandingOver
from paceline.elastic.joining.catching_up import CatchingUp
from paceline.elastic.joining.course import StrayedError
from paceline.elastic.joining.donors import Donor
from paceline.elastic.joining.following import Following
from paceline.elastic.joining.learner import Taught
from paceline.elastic.joining.newcomer import Newcomer
from paceline.elastic.joining.priority import at_low_priority
from paceline.elastic.joining.replay import LostDonorsError
from paceline.elastic.joining.steps import Steps
from paceline.elastic.joining.warming import warm_up
from paceline.elastic.meeting import LOST, Meeting, exchange_statuses
from paceline.elastic.messages import LEFT_OUT, OUTVOTED, Broken, Dismissed, Installed, View
from paceline.elastic.position import Position
from paceline.elastic.registry import Registry
from paceline.elastic.vote import OthersOutvotedError
from paceline.group.process_group import ProcessGroup
from paceline.record.names import EventKind
from paceline.record.spans import Recorded

T = TypeVar("T")


class Participation:
    """Takes one worker through all the views that it is in.

    Args:
        connection: the worker's connection to its launcher.
        registry: the state, which a worker that joins is given.
        here: where the worker is.
        steps: of the usual loop, which a worker that joins makes again; it cannot run the loop itself on results.

    Attributes:
        donor: the lessons that this worker gives.
        view: the latest view that it has entered, or that it was told of before it had the state.
        group: the process group of the current view; None while there is none.
        agreed: what the members of the current view have agreed on.
        catching_up: with the others, who have committed later rounds; None while this worker does not.
        is_leaving: it was asked to end.
    """

    def __init__(self, connection: LauncherConnection, registry: Registry, here: Position, steps: Steps | None) -> None:
        self._connection = connection
        self._registry = registry
        self._here = here
        self._steps = steps
        self._meeting = Meeting(connection)
        self._newcomer = Newcomer(connection)
        self._following: Following | None = None  # the others in the usual loop, before the script's loop begins
        self.donor = Donor(connection, registry, steps)
        self.view = View(0, (), is_planned=False)
        self.group: ProcessGroup | None = None
        self.agreed: Agreement = NOTHING_AGREED
        self.catching_up: CatchingUp | None = None
        self.is_leaving = False

    def begin(self, fingerprint: str, *, learns: bool) -> None:
        """Asks to take part, and returns when this worker has the state, and is in a view or about to catch up.

        Args:
            fingerprint, learns: see `Ready`.

        Raises:
            SystemExit: the launcher says that the worker takes no part.
        """
        self._newcomer.ask(fingerprint, learns=learns)
        self.until_it_holds(self.enter_next)

    def until_it_holds(self, attempt: Callable[[], T]) -> T:
        """Returns the result of `attempt` in the first view that lasts as long as it takes."""
        while True:
            try:
                return attempt()
            except (*LOST, OthersOutvotedError) as error:
                if self.group is not None or self.view.generation:
                    self._connection.send(Broken(self.view.generation, self._here.number, str(error)))
                self.group = None

    def enter_next(self) -> None:
        """Waits for the next view, and enters it; or begins to catch up.

        Raises:
            SystemExit: the launcher says that the worker ends, or it is not in that view.
        """
        while True:
            answer: View | Dismissed | Taught
            if self._here.number == FRESH:
                answer = self._newcomer.await_way_in(self.view.generation)
            else:
                answer = self._connection.await_view(self.view.generation, self._may_enter)
            if isinstance(answer, Dismissed):
                self.end(answer.reason, answer.code)
            if isinstance(answer, Taught):
                if self._begin_catching_up(answer):
                    return
                continue
            if self._here.number != FRESH or self._connection.name in answer.members:
                self.enter(answer)
                return
            # The view that this newcomer was to enter broke before it had the state: it asks again.
            self.view = answer
            self._newcomer.ask_again()

    def enter(self, view: View) -> None:
        """Enters a view with its other members.

        Raises:
            SystemExit: this worker is not in it.
        """
        before, self.view, self.group, self._here.is_late = self.view, view, None, False
        if self._connection.name not in view.members:
            code = 0 if self.is_leaving else LEFT_OUT
            self.end(f"it is not in view {view.generation}, which follows view {before.generation}", code)
        self.donor.entering(self._here.number, view)
        reach("view.entering")
        name = "planned" if view.is_planned else "forced"
        with Recorded(EventKind.VIEW_CHANGE, name, view.generation, len(view.members)):
            self._enter_with_others(view)

    def watch(self, dealt: Dealt) -> None:
        """Lets the script, which catches up, see itself as one more rank than those to whom a batch was dealt out."""
        self._meeting.watch_only(len(dealt.members))

    def ready_until(self) -> int:
        """Returns the largest number, of the views and lessons heard of, that this worker can act on at once."""
        return self._meeting.acts_up_to(self._connection.heard)

    def finish(self) -> None:
        """Ends what concerns others, since the loop is over; the current group stays."""
        self.donor.close()
        self._meeting.prepare_no_more()

    def end(self, reason: str, code: int) -> NoReturn:
        """Ends this worker."""
        self.donor.close()
        self._meeting.leave()
        sys.stderr.write(f"paceline: {self._connection} ends: {reason}\n")
        raise SystemExit(code)

    def _may_enter(self, view: View) -> bool:
        """Whether this worker may enter a view that it has heard of, since it has lost the one before or is new.

        A planned view is for members that have all arrived at the beginning of a batch: those that wait there for more
        workers, and newcomers. A worker that has lost its view does not know where the others are, and waits for a
        forced one.
        """
        if self._here.number == FRESH:
            return True
        return not view.is_planned or (self.group is not None and self.view.must_wait)

    def _enter_with_others(self, view: View) -> None:
        here = self._here
        group = self._meeting.enter(view)
        reach("view.formed")
        statuses = exchange_statuses(group, self._status())
        agreed = agree(statuses, here.shards)
        here.others_have = any(status.has_begun for status in statuses if status.round == agreed.round)
        here.dealings.learn([status.dealt for status in statuses], is_new=here.number == FRESH)
        self._share(group, agreed, statuses)
        if any(source is not None for source in agreed.source):
            # Nobody begins a batch before everybody has the state, so that whoever gives it is at the beginning of one.
            group.barrier()
        reach("view.agreed")
        here.portions.enter(statuses, agreed)
        self.agreed, self.group = agreed, group
        self._connection.send(Installed(view.generation, here.number))

    def _status(self) -> Status:
        following = self._following
        if self._here.number == FRESH and following is not None and not following.has_strayed:
            return following.status(self._here.dealings.latest)
        return self._here.status(teaches=self.donor.teaches)

    def _share(self, group: ProcessGroup, agreed: Agreement, statuses: Sequence[Status]) -> None:
        """Gives the state to those that lack it; learns that others have committed what this worker has voted for."""
        rank, handing_over = group.rank(), HandingOver(self._registry, group, self._steps)
        handing_over.give(agreed, statuses)
        if (source := agreed.source[rank]) is not None:
            handing_over.take(source, self._following if rank in agreed.followers else None)
            self._here.committed = agreed.committed
            if self._following is not None:
                self._following.holds = agreed.round
        if rank in agreed.outvoted:
            number = self._here.number
            self.end(f"the others have committed another result of round {number} than its own", OUTVOTED)
        self._here.learn(agreed, rank)

    def _begin_catching_up(self, taught: Taught) -> bool:
        """Takes over a snapshot, and in the usual loop follows the others; returns False if that led nowhere."""
        at_low_priority(lambda: self._registry.restore(taught.take_state()))
        at_low_priority(warm_up)
        reach("join.restored")
        contents = taught.contents
        self._here.dealings.learn([contents.dealt], is_new=True)
        if self._steps is not None:
            return self._follow(taught, self._steps)
        self._here.number, self._here.committed = contents.round, contents.committed
        self.catching_up = CatchingUp(self._connection, taught, self.enter, self.end)
        self.watch(contents.dealt)
        return True

    def _follow(self, taught: Taught, steps: Steps) -> bool:
        """Makes the others' steps until this worker is in a view; returns False, and asks again, if it cannot."""
        following = Following(self._connection, taught, self._enter_after, self.end, self._registry, steps)
        self._following = following
        try:
            following.until_admitted()
        except (StrayedError, LostDonorsError):
            self._here.number = FRESH
            self._newcomer.has_failed(may_learn=not following.has_strayed)
            return False
        finally:
            self._following = None
        return True

    def _enter_after(self, view: View) -> None:
        """Enters a view as one that has followed the others, and perhaps was left out of the view before."""
        if self._following is not None and self._following.holds == FRESH:
            self._here.number = FRESH
        self.enter(view)
