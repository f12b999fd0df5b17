"""A worker's membership in views. The worker obtains the state, enters views, and exits if a view excludes it.

When the members of a view have formed the view's group, they exchange statuses. `agreement.py` derives the members'
next actions from the statuses. Members that have the state then send all or a part of it to the members that lack it.
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
from paceline.train.elastic.agreement import (
    FRESH,
    LOST_MEMBER_ERRORS,
    NOTHING_AGREED,
    Agreement,
    BatchAssignment,
    MemberStatus,
    agree,
)
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.launcher_connection import LauncherConnection
from paceline.train.elastic.process_priority import run_at_low_priority
from paceline.train.elastic.protocol import LEFT_OUT, OUTVOTED, ExitRequest, View, ViewFailed, ViewInstalled
from paceline.train.elastic.state_transfer.catch_up import LoopCatchUp, OptimizerCatchUp, SendersLostError
from paceline.train.elastic.state_transfer.optimizer_steps import OptimizerStepHooks, StateDivergedError
from paceline.train.elastic.state_transfer.receiver import ReceivedState, ViewAdmission
from paceline.train.elastic.state_transfer.sender import StateSender
from paceline.train.elastic.training_state import TrainingState
from paceline.train.elastic.worker.progress import WorkerProgress
from paceline.train.elastic.worker.view_group import ViewGroups, exchange_statuses
from paceline.train.elastic.worker.vote import OthersOutvotedError

_OTHER = "its parameters or its optimizer state differed from those of the others when it entered the view"


T = TypeVar("T")


class WorkerMembership:
    """Manages the membership of one worker through all its views.

    Args:
        connection: The worker's connection to its launcher.
        registry: The state that a joining worker receives.
        progress: The worker's progress.
        steps: The hooks for the optimizer steps of a DDP loop, or None for other loops. A worker that joins a DDP loop
            replays the other workers' optimizer steps through these hooks, because it cannot run the script's loop
            before it is in a view.
    """

    def __init__(
        self,
        connection: LauncherConnection,
        registry: TrainingState,
        progress: WorkerProgress,
        steps: OptimizerStepHooks | None,
    ) -> None:
        self._connection = connection
        self._registry = registry
        self._progress = progress
        self._steps = steps
        self._view_groups = ViewGroups(connection)
        self._admission = ViewAdmission(connection)
        self._following: OptimizerCatchUp | None = None  # used in a DDP loop until the script's loop begins
        self.sender = StateSender(connection, registry, steps)
        self.view = View(0, (), is_planned=False)  # the latest one entered, or received by a worker without state
        self.group: ProcessGroup | None = None  # of the current view
        self.agreed: Agreement = NOTHING_AGREED  # between the members of the current view
        self.catching_up: LoopCatchUp | None = None  # the replay of rounds that others have committed
        self.is_leaving = False  # whether the worker was asked to exit

    def begin(self, fingerprint: str, *, can_catch_up: bool) -> None:
        """Requests to join (see `WorkerReady`); returns when this worker has the state and is in a view or catches up.

        Raises SystemExit if the launcher dismisses the worker.
        """
        self._admission.request(fingerprint, can_catch_up=can_catch_up)
        self.retry_until_view_holds(self.enter_next_view)

    def retry_until_view_holds(self, attempt: Callable[[], T]) -> T:
        """Calls `attempt`, and repeats it in each new view until a call completes without the loss of a member."""
        while True:
            try:
                return attempt()
            except (*LOST_MEMBER_ERRORS, OthersOutvotedError) as error:
                if self.group is not None or self.view.generation:
                    self._connection.send(ViewFailed(self.view.generation, self._progress.number, str(error)))
                self.group = None

    def enter_next_view(self) -> None:
        """Waits for the next view and enters it, or begins to catch up.

        Raises SystemExit if the launcher dismisses the worker or the view does not contain it.
        """
        while True:
            answer: View | ExitRequest | ReceivedState
            if self._progress.number == FRESH:
                answer = self._admission.await_admission(self.view.generation)
            else:
                answer = self._connection.await_view(self.view.generation, self._may_enter)
            if isinstance(answer, ExitRequest):
                self.end(answer.reason, answer.code)
            if isinstance(answer, ReceivedState):
                if self._begin_catching_up(answer):
                    return
                continue
            if self._progress.number != FRESH or self._connection.name in answer.members:
                self.enter(answer)
                return
            # The view broke before this new worker had the state.
            self.view = answer
            self._admission.request_again()

    def enter(self, view: View) -> None:
        """Enters a view together with the other members; raises SystemExit if it does not contain this worker."""
        before, self.view, self.group, self._progress.is_late = self.view, view, None, False
        if self._connection.name not in view.members:
            code = 0 if self.is_leaving else LEFT_OUT
            self.end(f"it is not in view {view.generation}, which follows view {before.generation}", code)
        self.sender.entering(self._progress.number, view)
        failpoint("view.entering")
        name = "planned" if view.is_planned else "forced"
        with RecordedSpan(EventKind.VIEW_CHANGE, name, view.generation, len(view.members)):
            self._enter_with_others(view)

    def watch(self, dealt: BatchAssignment) -> None:
        """Presents this process to the script as an extra rank, beyond the batch's own ranks, while it catches up."""
        self._view_groups.watch_only(len(dealt.members))

    def ready_until(self) -> int:
        """Returns the number of the latest view or transfer on which this worker can act immediately."""
        return self._view_groups.acts_up_to(self._connection.latest_received)

    def finish(self) -> None:
        """Stops serving other workers after the loop has completed. The current group remains."""
        self.sender.close()
        self._view_groups.prepare_no_more()

    def end(self, reason: str, code: int) -> NoReturn:
        """Terminates this worker."""
        self.sender.close()
        self._view_groups.leave()
        sys.stderr.write(f"paceline: {self._connection} ends: {reason}\n")
        raise SystemExit(code)

    def _may_enter(self, view: View) -> bool:
        """Returns True if this worker may enter a received view.

        A new worker may enter any view, and any worker may enter a forced view. A member may enter a planned view only
        while it waits between batches for more workers. A worker whose view broke has no information about the others'
        progress, and must wait for a forced view.
        """
        if self._progress.number == FRESH:
            return True
        return not view.is_planned or (self.group is not None and self.view.must_wait)

    def _enter_with_others(self, view: View) -> None:
        progress = self._progress
        group = self._view_groups.enter(view)
        failpoint("view.formed")
        statuses = exchange_statuses(group, self._status())
        agreed = agree(statuses, progress.shards)
        progress.others_have = any(status.has_begun for status in statuses if status.round == agreed.round)
        progress.assignments.merge([status.dealt for status in statuses], is_new=progress.number == FRESH)
        self._share(group, agreed, statuses)
        if any(source is not None for source in agreed.source):
            # No member may begin a batch before all members have the state.
            group.barrier()
        failpoint("view.agreed")
        progress.shard_assignment.enter(statuses, agreed)
        self.agreed, self.group = agreed, group
        self._connection.send(ViewInstalled(view.generation, progress.number))

    def _status(self) -> MemberStatus:
        following = self._following
        if self._progress.number == FRESH and following is not None and not following.has_diverged:
            return following.status(self._progress.assignments.latest)
        return self._progress.status(is_sender=self.sender.is_sender)

    def _share(self, group: ProcessGroup, agreed: Agreement, statuses: Sequence[MemberStatus]) -> None:
        """Sends and receives missing state, and adopts the agreement; exits if this worker was outvoted."""
        rank = group.rank()
        for receiver, source in enumerate(agreed.source):
            if source == rank:
                self._send_state(group, receiver, receiver in agreed.followers, statuses[receiver])
        if (source := agreed.source[rank]) is not None:
            self._receive_state(group, source, self._following if rank in agreed.followers else None)
            self._progress.committed = agreed.committed
            if self._following is not None:
                self._following.holds = agreed.round
        if rank in agreed.outvoted:
            number = self._progress.number
            self.end(f"the others have committed a different result of round {number}", OUTVOTED)
        self._progress.adopt(agreed, rank)

    def _send_state(self, group: ProcessGroup, receiver: int, is_follower: bool, status: MemberStatus) -> None:
        """Sends the state to a rank. A follower receives only the rest unless its parts of the state differ."""
        failpoint("state.before_sending")
        with RecordedSpan(EventKind.CHECKPOINT, "send"):
            digest_of = self._registry.rolling_digest
            lacks_all = not is_follower or any(digest_of(window) != digest for window, digest in status.parts)
            state = self._registry.capture() if lacks_all else self._registry.capture_rest(self._is_known)
            send_object_list([lacks_all, state], group_dst=receiver, group=group)
        failpoint("state.sent")

    def _receive_state(self, group: ProcessGroup, source: int, follower: OptimizerCatchUp | None) -> None:
        """Receives the entire state, or only the rest of it if this worker is a follower."""
        with RecordedSpan(EventKind.CHECKPOINT, "receive"):
            box: list[Any] = [None, None]
            recv_object_list(box, group_src=source, group=group)
            lacks_all, state = box
            if not lacks_all:
                self._registry.restore_rest(state)
            else:
                if follower is not None:
                    follower.mark_diverged(_OTHER)
                self._registry.restore(state)
        failpoint("state.loaded")

    def _is_known(self, param: torch.Tensor) -> bool:
        return self._steps is not None and self._steps.are_noted(param)

    def _begin_catching_up(self, received: ReceivedState) -> bool:
        """Restores a snapshot and begins to catch up; returns False if catching up in a DDP loop failed."""
        run_at_low_priority(lambda: self._registry.restore(received.take_state()))
        run_at_low_priority(warm_up)
        failpoint("join.restored")
        contents = received.contents
        self._progress.assignments.merge([contents.dealt], is_new=True)
        if self._steps is not None:
            return self._follow(received, self._steps)
        self._progress.number, self._progress.committed = contents.round, contents.committed
        self.catching_up = LoopCatchUp(self._connection, received, self.enter, self.end)
        self.watch(contents.dealt)
        return True

    def _follow(self, received: ReceivedState, steps: OptimizerStepHooks) -> bool:
        """Repeats the others' steps until this worker is in a view.

        On failure, requests to join again and returns False.
        """
        following = OptimizerCatchUp(self._connection, received, self._enter_after, self.end, self._registry, steps)
        self._following = following
        try:
            following.until_admitted()
        except (StateDivergedError, SendersLostError):
            self._progress.number = FRESH
            self._admission.has_failed(may_retry=not following.has_diverged)
            return False
        finally:
            self._following = None
        return True

    def _enter_after(self, view: View) -> None:
        """Enters a view after repeating the others' steps. A worker with incomplete state enters as a new one."""
        if self._following is not None and self._following.holds == FRESH:
            self._progress.number = FRESH
        self.enter(view)


def warm_up() -> None:
    """Computes a product and its gradient, which initializes torch's libraries.

    The first call in a process takes several milliseconds, even in a forked process. The sizes do not matter, and no
    random numbers are drawn.
    """
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.zeros(8, 8, dtype=torch.float32, device="cpu", requires_grad=True)
        torch.nn.functional.linear(torch.zeros(8, 8, dtype=torch.float32, device="cpu"), weight).sum().backward()
