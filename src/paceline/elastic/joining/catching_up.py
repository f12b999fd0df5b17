"""A worker that has the state of some rounds ago follows the others, and then enters a view.

In the loop of logical shards it runs the script's loop on their results; `following.py` has the usual loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from paceline.elastic.connection import LauncherConnection
from paceline.elastic.dealings import Dealt
from paceline.elastic.failpoints import reach
from paceline.elastic.joining.learner import Taught
from paceline.elastic.joining.replay import LostDonorsError, Replay
from paceline.elastic.joining.wire import Result
from paceline.elastic.meeting import LOST
from paceline.elastic.messages import LEFT_OUT, OUTVOTED, Broken, Dismissed, Learned, View
from paceline.elastic.vote import CAUSES
from paceline.parallel.digests import digest_of
from paceline.parallel.sharded.sums import Values

_ENDING_S = 1.0  # how long a learner without donors waits for the news that the job is over


class Learning:
    """What learners of both loops do: they say when they are near, and enter the view that lets them in.

    Args:
        connection: the worker's connection to its launcher.
        taught: what the donors have given; the state has been taken over.
        enter: enters a view.
        end: ends this worker, for a reason and with an exit code.
    """

    def __init__(
        self,
        connection: LauncherConnection,
        taught: Taught,
        enter: Callable[[View], None],
        end: Callable[[str, int], NoReturn],
    ) -> None:
        self._connection = connection
        self._enter, self._end = enter, end
        self._replay = Replay(taught.donors, self._is_near, self._check, self._may_come)

    def _may_come(self) -> bool:
        """Whether this worker may be admitted once it has caught up."""
        return True

    def _is_near(self, round_number: int) -> None:
        reach("join.near")
        self._connection.send(Learned(round_number))

    def _check(self) -> None:
        """Ends this worker if it was asked to end."""
        if (order := self._connection.dismissed) is not None:
            self._end(order.reason, order.code)

    def _comes_in(self, generation: int, holds: Callable[[], int]) -> bool:
        """Enters the view that the others have entered, or one that follows because it broke, if it has this worker.

        Args:
            generation: the number of the view.
            holds: returns the round whose state this worker has by now.
        """
        after = generation - 1
        while True:
            view = self._connection.await_view(after, lambda each: each.generation == generation or not each.is_planned)
            if isinstance(view, Dismissed):
                self._end(view.reason, view.code)
            if self._connection.name not in view.members:
                return False
            try:
                self._enter(view)
            except LOST as error:
                after = view.generation
                self._connection.send(Broken(view.generation, holds(), str(error)))
            else:
                return True


class CatchingUp(Learning):
    """Gives the script's loop the others' results until they let this worker in."""

    def result(self, round_number: int, state: int) -> tuple[Values, int]:
        """Returns the result of the round, which the others have committed, and its digest.

        Args:
            round_number: the round.
            state: the digest of a part of this worker's state, which must be that of the others.
        """
        try:
            said, values = self._replay.take(round_number)
        except LostDonorsError as error:
            self.give_up(str(error))
        if said.state != state:
            self._end(f"its state before round {round_number} differs from that of the others. {CAUSES}", OUTVOTED)
        if digest_of(values) != said.digest:
            self._end(f"the result of round {round_number} came damaged", LEFT_OUT)
        reach("join.replay")
        return values, said.digest

    def until_batch(self, round_number: int) -> Dealt | None:
        """Returns how the batch that begins now was dealt out to the others; None if this worker is among them now."""
        while True:
            self._check()
            try:
                item = self._replay.next(round_number)
            except LostDonorsError as error:
                self.give_up(str(error))
            if isinstance(item, Result):
                return item.dealt
            if self._connection.name in item.members and self._comes_in(item.generation, lambda: round_number):
                self._replay.close()
                return None
            self._replay.was_left_out()

    def give_up(self, reason: str) -> NoReturn:
        """Ends this worker, which cannot catch up any more; if that is because the job is over, it is told so."""
        until_s = time.monotonic() + _ENDING_S

        def found() -> list[Dismissed]:
            if (order := self._connection.dismissed) is not None:
                return [order]
            return [Dismissed(reason, LEFT_OUT)] if time.monotonic() > until_s else []

        order = self._connection.await_news(found)
        self._end(order.reason, order.code)
