"""The catch-up of a receiver, which replays the rounds committed after the snapshot and then enters a view.

With logical shards, the receiver runs the script's loop with the members' results (`LoopCatchUp`). In a DDP loop, the
receiver cannot participate in the members' forward and backward passes. It repeats the members' optimizer steps before
the script's loop begins (`OptimizerCatchUp`), and receives the remaining state, such as the buffers, the scheduler and
the loader, when it enters the view.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from paceline.comm.security.encryption import Connection
from paceline.train.elastic.agreement import FRESH, LOST_MEMBER_ERRORS, WINDOWS, BatchAssignment, MemberStatus
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.launcher_connection import LauncherConnection
from paceline.train.elastic.process_priority import run_at_low_priority
from paceline.train.elastic.protocol import LEFT_OUT, OUTVOTED, CaughtUp, ExitRequest, View, ViewFailed
from paceline.train.elastic.state_transfer.optimizer_steps import (
    OptimizerStepHooks,
    StateDivergedError,
    StateDivergence,
)
from paceline.train.elastic.state_transfer.receiver import ReceivedState
from paceline.train.elastic.state_transfer.transfer_protocol import (
    NEAR,
    REQUEST,
    BrokenTransferError,
    LogEndReached,
    LogItem,
    OptimizerStep,
    RequestKind,
    RoundResult,
    ViewEntered,
    digest_of_chunk,
    receive_head,
    receive_into,
)
from paceline.train.elastic.training_state import CAUSES, TrainingState
from paceline.train.logical_shards.tree_sum import Values
from paceline.train.module_tensors import digest_of, memory_of

_LOOK_S = 0.1
_TRIES, _MORE_TRIES = 4, 16


@dataclass
class AdmissionTest:
    """Decides when to admit a receiver: when it has caught up, or after so many results that it is not expected to.

    A receiver whose loop is no faster than the members' never catches up. The members then wait while it replays the
    missing rounds.

    >>> AdmissionTest().is_near(0), AdmissionTest().is_near(2)
    (True, False)
    """

    _first: int | None = None
    _taken: int = 0

    def is_near(self, behind: int) -> bool:
        """Records a received result, with `behind` results remaining; returns whether to admit the receiver."""
        if self._first is None:
            self._first = behind
        self._taken += 1
        return behind <= NEAR or self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """Whether the receiver is admitted without having caught up."""
        return self._first is not None and self._taken > _TRIES * self._first + _MORE_TRIES


class SendersLostError(Exception):
    """Raised if no sender is left to serve the results."""


class RemoteLog:
    """The results of the rounds after a snapshot, fetched from the senders.

    Calls for results raise SendersLostError if no sender is left.

    Args:
        senders: The connections to the senders' children, all of which serve the same results.
        on_near: A function that is called with the round number once the receiver can be admitted.
        check: A function that is called during waits, and may raise an error.
        may_join: A function that returns whether a receiver that has caught up may be admitted. It is called until it
            returns True.

    Attributes:
        is_near: Whether the receiver can be admitted to the members' next view.
    """

    def __init__(
        self,
        senders: list[Connection],
        on_near: Callable[[int], None],
        check: Callable[[], None],
        may_join: Callable[[], bool] = lambda: True,
    ) -> None:
        self._senders = senders
        self._on_near, self._check, self._may_join = on_near, check, may_join
        self._generation = 0  # the last view that, according to the log, the members have entered
        self._pursuit = AdmissionTest()
        self.is_near = False
        self._next: tuple[LogItem, Values] | None = None
        self._steps = 0  # the optimizer steps since the previous round

    def follow(self, round_number: int) -> tuple[LogItem, Values]:
        """Returns the next log item of a round in a DDP loop; the last item of a round is its result."""
        item, values = self._get(round_number)
        match item:
            case OptimizerStep():
                self._steps += 1
            case RoundResult():
                self._steps = 0
            case ViewEntered():
                self._generation = item.generation
        return item, values

    def next(self, round_number: int) -> RoundResult | ViewEntered:
        """Returns the members' next result or view, given the receiver's next round, without removing a result."""
        if self._next is None:
            self._next = self.follow(round_number)
        item = self._next[0]
        assert not isinstance(item, OptimizerStep), "the loop of logical shards has no such items"
        if isinstance(item, ViewEntered):
            self._next = None
        return item

    def take(self, round_number: int) -> tuple[RoundResult, Values]:
        """Removes and returns the result of a round."""
        while not isinstance(self.next(round_number), RoundResult):
            pass  # skips a view that began in the middle of a batch, because such a view does not admit workers
        assert self._next is not None
        (item, values), self._next = self._next, None
        assert isinstance(item, RoundResult)
        return item, values

    def was_left_out(self) -> None:
        """Records that the receiver was not admitted, and must report again when it can be admitted."""
        self.is_near = False

    def close(self) -> None:
        """Closes the transfer. Idempotent."""
        for sender in self._senders:
            sender.close()
        self._senders.clear()

    def _get(self, round_number: int) -> tuple[LogItem, Values]:
        while self._senders:
            sender = self._senders[0]
            try:
                return self._get_from(sender, round_number)
            except (BrokenTransferError, OSError):
                self._senders.pop(0).close()
        raise SendersLostError(f"no worker serves the result of round {round_number} any longer")

    def _get_from(self, sender: Connection, round_number: int) -> tuple[LogItem, Values]:
        sender.sendall(REQUEST.pack(RequestKind.ITEM, round_number, self._generation, self._steps))
        for other in self._senders[1:]:
            with contextlib.suppress(OSError):  # the loss of a sender is detected when the sender is needed
                other.sendall(REQUEST.pack(RequestKind.FORGET, round_number, 0, self._steps))
        while True:
            while not select.select([sender], [], [], _LOOK_S)[0]:
                self._check()
            head, ahead = receive_head(sender)
            match head:
                case LogEndReached():
                    self._near(round_number)
                case ViewEntered():
                    return head, []
                case OptimizerStep():
                    values = _receive(sender, head)
                    if digest_of_chunk([memory_of(tensor) for tensor in values]) != head.digest:
                        raise BrokenTransferError(f"a step before round {head.round} arrived damaged")
                    return head, values
                case RoundResult():
                    values = _receive(sender, head)
                    if self._pursuit.is_near(ahead):
                        self._near(round_number)
                    return head, values
                case _:
                    raise BrokenTransferError(f"{type(head).__name__} instead of a result")

    def _near(self, round_number: int) -> None:
        if not self.is_near and (self._pursuit.is_hopeless or self._may_join()):
            self.is_near = True
            self._on_near(round_number)


def _receive(sender: Connection, head: RoundResult | OptimizerStep) -> Values:
    values = []
    for name, shape in head.tensors:
        dtype = getattr(torch, name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise BrokenTransferError(f"a tensor of {name}")
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        receive_into(sender, memory_of(tensor))
        values.append(tensor)
    return values


_ENDING_S = 1.0  # time for which a receiver without senders waits for the message that the job has ended


class CatchUp:
    """The base class of both kinds of catch-up.

    Reports that the receiver can be admitted, and enters the view that admits it.

    Args:
        connection: The worker's connection to its launcher.
        received: The result of the transfer, whose state has been restored.
        enter: A function that enters a view.
        end: A function that terminates this worker, given a reason and an exit code.
    """

    def __init__(
        self,
        connection: LauncherConnection,
        received: ReceivedState,
        enter: Callable[[View], None],
        end: Callable[[str, int], NoReturn],
    ) -> None:
        self._connection = connection
        self._enter, self._end = enter, end
        self._replay = RemoteLog(received.senders, self._is_near, self._check, self._may_join)

    def _may_join(self) -> bool:
        """Returns True if this worker may be admitted once it has caught up."""
        return True

    def _is_near(self, round_number: int) -> None:
        failpoint("join.near")
        self._connection.send(CaughtUp(round_number))

    def _check(self) -> None:
        """Exits if this worker was ordered to exit."""
        if (order := self._connection.dismissed) is not None:
            self._end(order.reason, order.code)

    def _is_admitted(self, generation: int, holds: Callable[[], int]) -> bool:
        """Enters the members' view, or a forced view that replaced it; returns False if this worker is excluded.

        `holds` returns the round whose initial state this worker has.
        """
        after = generation - 1
        while True:
            view = self._connection.await_view(
                after, lambda found: found.generation == generation or not found.is_planned
            )
            if isinstance(view, ExitRequest):
                self._end(view.reason, view.code)
            if self._connection.name not in view.members:
                return False
            try:
                self._enter(view)
            except LOST_MEMBER_ERRORS as error:
                after = view.generation
                self._connection.send(ViewFailed(view.generation, holds(), str(error)))
            else:
                return True


class LoopCatchUp(CatchUp):
    """Feeds the others' results to the script's loop until this worker is admitted."""

    def result(self, round_number: int, state: int) -> tuple[Values, int]:
        """Returns the committed result of the round, and its digest.

        `state` is the digest of a part of this worker's state, which must equal the members' digest.
        """
        try:
            committed, values = self._replay.take(round_number)
        except SendersLostError as error:
            self.give_up(str(error))
        if committed.state != state:
            self._end(f"its state before round {round_number} differs from that of the others. {CAUSES}", OUTVOTED)
        if digest_of(values) != committed.digest:
            self._end(f"the result of round {round_number} arrived damaged", LEFT_OUT)
        failpoint("join.replay")
        return values, committed.digest

    def until_batch(self, round_number: int) -> BatchAssignment | None:
        """Returns the members' assignment of the next batch, or None if this worker has been admitted."""
        while True:
            self._check()
            try:
                item = self._replay.next(round_number)
            except SendersLostError as error:
                self.give_up(str(error))
            if isinstance(item, RoundResult):
                return item.dealt
            if self._connection.name in item.members and self._is_admitted(item.generation, lambda: round_number):
                self._replay.close()
                return None
            self._replay.was_left_out()

    def give_up(self, reason: str) -> NoReturn:
        """Terminates this worker because it can no longer catch up.

        If the job has ended, the reason given by the launcher is used.
        """
        until_s = time.monotonic() + _ENDING_S

        def found() -> list[ExitRequest]:
            if (order := self._connection.dismissed) is not None:
                return [order]
            return [ExitRequest(reason, LEFT_OUT)] if time.monotonic() > until_s else []

        order = self._connection.await_message(found)
        self._end(order.reason, order.code)


_LARGE = 128 << 20  # size in bytes above which the digest of a sixteenth of the state takes more than a millisecond
_SMALL = 16 << 20  # size in bytes up to which members wait for a digest of the whole state, which takes about 2 ms
_COMPARING_S = 2.0  # maximum time by which the comparison of all parts delays the admission


class OptimizerCatchUp(CatchUp):
    """Repeats the others' optimizer steps, through the hooks `steps`, until this worker is admitted.

    Attributes:
        holds: The round whose initial state this worker has in full, or FRESH while it lacks a part of that state.
        has_diverged: Whether the worker's state differs from the members' state, or cannot become equal to it.
    """

    def __init__(
        self,
        connection: LauncherConnection,
        received: ReceivedState,
        enter: Callable[[View], None],
        end: Callable[[str, int], NoReturn],
        registry: TrainingState,
        steps: OptimizerStepHooks,
    ) -> None:
        super().__init__(connection, received, enter, end)
        self._registry, self._steps = registry, steps
        nbytes = registry.nbytes
        self._is_small = nbytes <= _SMALL
        self._course = StateDivergence(
            received.contents.round, received.contents.committed, WINDOWS, is_large=nbytes > _LARGE
        )
        self._caught_up_s: float | None = None
        self.holds = FRESH
        self.has_diverged = False

    def status(self, dealt: BatchAssignment) -> MemberStatus:
        """Returns the status that this worker sends when it enters a view."""
        windows = range(WINDOWS) if self._is_small else sorted(self._course.unchecked)
        parts = tuple((window, self._registry.rolling_digest(window)) for window in windows)
        return MemberStatus(
            self._course.round, dealt=dealt, committed=self._course.committed, has_followed=True, parts=parts
        )

    def until_admitted(self) -> None:
        """Blocks until this worker is in a view with the others.

        Raises StateDivergedError if this worker's state differs from the members', and SendersLostError if no sender is
        left.
        """
        try:
            while True:
                entered = run_at_low_priority(lambda: self._until_next_view(or_near=True)) or self._until_next_view()
                assert entered is not None
                if self._connection.name not in entered.members:
                    continue
                if self._is_admitted(entered.generation, lambda: self.holds):
                    return
                self.holds = FRESH
                if self.has_diverged:
                    raise StateDivergedError("the others have continued without it")
                self._replay.was_left_out()
        except StateDivergedError as error:
            self.mark_diverged(str(error))
            raise
        finally:
            self._replay.close()

    def mark_diverged(self, reason: str) -> None:
        """Reports, at most once, why this worker needs the entire state, which is sent while the others wait."""
        if not self.has_diverged:
            self.has_diverged = True
            sys.stderr.write(f"paceline: {self._connection} needs the whole state, and the others wait: {reason}\n")

    def _may_join(self) -> bool:
        """Returns True if all parts of the state have been compared or the comparison has exceeded its time limit."""
        if self._caught_up_s is None:
            self._caught_up_s = time.monotonic()
        is_compared = self._is_small or not self._course.unchecked
        return is_compared or time.monotonic() - self._caught_up_s > _COMPARING_S

    def _until_next_view(self, *, or_near: bool = False) -> ViewEntered | None:
        """Repeats the steps before the members' next view; if `or_near`, returns None once this worker can be admitted.

        Once this worker can be admitted, it must run at normal priority, because the members wait in their next view
        until this worker has repeated the last step before that view.
        """
        while not (or_near and self._replay.is_near):
            self._check()
            item, values = self._replay.follow(self._course.round)
            match item:
                case OptimizerStep():
                    self._course.steps(item)
                    self._steps.again(item, values)
                    failpoint("join.replay")
                case RoundResult():
                    compares = self._course.compares(item.round)
                    self._course.passes(item, self._registry.rolling_digest(item.round) if compares else None)
                case ViewEntered():
                    return item
        return None
