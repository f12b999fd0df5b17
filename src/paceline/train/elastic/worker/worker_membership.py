"""How a worker takes part: it gets the state, enters views one after the other, and ends when it is not in the next.

`agreement.py` says what follows from what the members of a view tell each other when they enter it.

How the members of a view that have the state give it, or a part of it, to those that lack it.

What a process that computes pays for once, paid while nobody waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from paceline.comm.group.collectives.object_collectives import recv_object_list, send_object_list
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import RecordedSpan
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.process_priority import run_at_low_priority
from paceline.train.elastic.protocol import LEFT_OUT, OUTVOTED, Broken, Dismissed, Installed, View
from paceline.train.elastic.state_transfer.catch_up import LoopCatchUp, OptimizerCatchUp, SendersLostError
from paceline.train.elastic.state_transfer.optimizer_steps import OptimizerStepHooks, StateDivergedError
from paceline.train.elastic.state_transfer.receiver import ReceivedState, ViewAdmission
from paceline.train.elastic.state_transfer.sender import StateSender
from paceline.train.elastic.worker.agreement import (
    FRESH,
    NOTHING_AGREED,
    Agreement,
    BatchAssignment,
    MemberStatus,
    agree,
)
from paceline.train.elastic.worker.launcher_connection import LauncherConnection
from paceline.train.elastic.worker.progress import WorkerProgress
from paceline.train.elastic.worker.training_state import TrainingState
from paceline.train.elastic.worker.view_group import LOST_MEMBER_ERRORS, ViewGroups, exchange_statuses
from paceline.train.elastic.worker.vote import OthersOutvotedError

_OTHER = "its parameters, or what its optimizer keeps, differed from those of the others when it entered the view"


class ViewStateTransfer:
    """What this worker gives and gets when it enters a view.

    Args:
        registry: the state.
        group: the process group of the view.
        steps: of the usual loop, in which a worker may have followed them, and lacks only the rest.
    """

    def __init__(self, registry: TrainingState, group: ProcessGroup, steps: OptimizerStepHooks | None) -> None:
        self._registry, self._group, self._steps = registry, group, steps

    def give(self, agreed: Agreement, statuses: Sequence[MemberStatus]) -> None:
        """Gives the others what they lack, as far as this worker is to."""
        for receiver, source in enumerate(agreed.source):
            if source == self._group.rank():
                failpoint("state.before_sending")
                with RecordedSpan(EventKind.CHECKPOINT, "send"):
                    lacks_all = receiver not in agreed.followers or self._differs(statuses[receiver])
                    state = self._registry.capture() if lacks_all else self._registry.capture_rest(self._is_known)
                    send_object_list([lacks_all, state], group_dst=receiver, group=self._group)
                failpoint("state.sent")

    def take(self, source: int, follower: OptimizerCatchUp | None) -> None:
        """Takes over what this worker lacks; `follower` if that may not be the whole."""
        with RecordedSpan(EventKind.CHECKPOINT, "receive"):
            box: list[Any] = [None, None]
            recv_object_list(box, group_src=source, group=self._group)
            lacks_all, state = box
            if not lacks_all:
                self._registry.restore_rest(state)
            else:
                if follower is not None:
                    follower.strays(_OTHER)
                self._registry.restore(state)
        failpoint("state.loaded")

    def _differs(self, follower: MemberStatus) -> bool:
        return any(self._registry.rolling_digest(window) != digest for window, digest in follower.parts)

    def _is_known(self, param: torch.Tensor) -> bool:
        return self._steps is not None and self._steps.are_noted(param)


def warm_up() -> None:
    """Computes a product and its gradient, which takes several milliseconds the first time in a process.

    The libraries of torch set themselves up then, also after a fork. The sizes do not matter, and no random number is
    drawn.
    """
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.zeros(8, 8, dtype=torch.float32, device="cpu", requires_grad=True)
        torch.nn.functional.linear(torch.zeros(8, 8, dtype=torch.float32, device="cpu"), weight).sum().backward()


T = TypeVar("T")


class WorkerMembership:
    """Takes one worker through all the views that it is in.

    Args:
        connection: the worker's connection to its launcher.
        registry: the state, which a worker that joins is given.
        here: where the worker is.
        steps: of the usual loop, which a worker that joins makes again; it cannot run the loop itself on results.

    Attributes:
        sender: the transfers that this worker gives.
        view: the latest view that it has entered, or that it was told of before it had the state.
        group: the process group of the current view; None while there is none.
        agreed: what the members of the current view have agreed on.
        catching_up: with the others, who have committed later rounds; None while this worker does not.
        is_leaving: it was asked to end.
    """

    def __init__(
        self,
        connection: LauncherConnection,
        registry: TrainingState,
        here: WorkerProgress,
        steps: OptimizerStepHooks | None,
    ) -> None:
        self._connection = connection
        self._registry = registry
        self._here = here
        self._steps = steps
        self._meeting = ViewGroups(connection)
        self._newcomer = ViewAdmission(connection)
        self._following: OptimizerCatchUp | None = None  # the others in the usual loop, before the script's loop begins
        self.sender = StateSender(connection, registry, steps)
        self.view = View(0, (), is_planned=False)
        self.group: ProcessGroup | None = None
        self.agreed: Agreement = NOTHING_AGREED
        self.catching_up: LoopCatchUp | None = None
        self.is_leaving = False

    def begin(self, fingerprint: str, *, learns: bool) -> None:
        """Asks to take part, and returns when this worker has the state, and is in a view or about to catch up.

        Args:
            fingerprint, learns: see `Ready`.

        Raises:
            SystemExit: the launcher says that the worker takes no part.
        """
        self._newcomer.ask(fingerprint, learns=learns)
        self.retry_until_view_holds(self.enter_next_view)

    def retry_until_view_holds(self, attempt: Callable[[], T]) -> T:
        """Returns the result of `attempt` in the first view that lasts as long as it takes."""
        while True:
            try:
                return attempt()
            except (*LOST_MEMBER_ERRORS, OthersOutvotedError) as error:
                if self.group is not None or self.view.generation:
                    self._connection.send(Broken(self.view.generation, self._here.number, str(error)))
                self.group = None

    def enter_next_view(self) -> None:
        """Waits for the next view, and enters it; or begins to catch up.

        Raises:
            SystemExit: the launcher says that the worker ends, or it is not in that view.
        """
        while True:
            answer: View | Dismissed | ReceivedState
            if self._here.number == FRESH:
                answer = self._newcomer.await_admission(self.view.generation)
            else:
                answer = self._connection.await_view(self.view.generation, self._may_enter)
            if isinstance(answer, Dismissed):
                self.end(answer.reason, answer.code)
            if isinstance(answer, ReceivedState):
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
        self.sender.entering(self._here.number, view)
        failpoint("view.entering")
        name = "planned" if view.is_planned else "forced"
        with RecordedSpan(EventKind.VIEW_CHANGE, name, view.generation, len(view.members)):
            self._enter_with_others(view)

    def watch(self, dealt: BatchAssignment) -> None:
        """Lets the script, which catches up, see itself as one more rank than those to whom a batch was dealt out."""
        self._meeting.watch_only(len(dealt.members))

    def ready_until(self) -> int:
        """Returns the largest number, of the views and transfers heard of, that this worker can act on at once."""
        return self._meeting.acts_up_to(self._connection.heard)

    def finish(self) -> None:
        """Ends what concerns others, since the loop is over; the current group stays."""
        self.sender.close()
        self._meeting.prepare_no_more()

    def end(self, reason: str, code: int) -> NoReturn:
        """Ends this worker."""
        self.sender.close()
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
        failpoint("view.formed")
        statuses = exchange_statuses(group, self._status())
        agreed = agree(statuses, here.shards)
        here.others_have = any(status.has_begun for status in statuses if status.round == agreed.round)
        here.dealings.learn([status.dealt for status in statuses], is_new=here.number == FRESH)
        self._share(group, agreed, statuses)
        if any(source is not None for source in agreed.source):
            # Nobody begins a batch before everybody has the state, so that whoever gives it is at the beginning of one.
            group.barrier()
        failpoint("view.agreed")
        here.portions.enter(statuses, agreed)
        self.agreed, self.group = agreed, group
        self._connection.send(Installed(view.generation, here.number))

    def _status(self) -> MemberStatus:
        following = self._following
        if self._here.number == FRESH and following is not None and not following.has_strayed:
            return following.status(self._here.dealings.latest)
        return self._here.status(teaches=self.sender.teaches)

    def _share(self, group: ProcessGroup, agreed: Agreement, statuses: Sequence[MemberStatus]) -> None:
        """Gives the state to those that lack it; learns that others have committed what this worker has voted for."""
        rank, handing_over = group.rank(), ViewStateTransfer(self._registry, group, self._steps)
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

    def _begin_catching_up(self, received: ReceivedState) -> bool:
        """Takes over a snapshot, and in the usual loop follows the others; returns False if that led nowhere."""
        run_at_low_priority(lambda: self._registry.restore(received.take_state()))
        run_at_low_priority(warm_up)
        failpoint("join.restored")
        contents = received.contents
        self._here.dealings.learn([contents.dealt], is_new=True)
        if self._steps is not None:
            return self._follow(received, self._steps)
        self._here.number, self._here.committed = contents.round, contents.committed
        self.catching_up = LoopCatchUp(self._connection, received, self.enter, self.end)
        self.watch(contents.dealt)
        return True

    def _follow(self, received: ReceivedState, steps: OptimizerStepHooks) -> bool:
        """Makes the others' steps until this worker is in a view; returns False, and asks again, if it cannot."""
        following = OptimizerCatchUp(self._connection, received, self._enter_after, self.end, self._registry, steps)
        self._following = following
        try:
            following.until_admitted()
        except (StateDivergedError, SendersLostError):
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
