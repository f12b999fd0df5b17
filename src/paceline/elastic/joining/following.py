"""A worker of the usual loop that has the state of some rounds ago makes the others' steps, and then enters a view.

It is not in the script's loop yet, whose forward and backward it could not make with the others. What changes apart
from the steps, such as buffers, the scheduler and the loader, it gets when it enters the view.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from paceline.elastic.agreement import FRESH, WINDOWS, Status
from paceline.elastic.connection import LauncherConnection
from paceline.elastic.dealings import Dealt
from paceline.elastic.failpoints import reach
from paceline.elastic.joining.catching_up import Learning
from paceline.elastic.joining.course import Course, StrayedError
from paceline.elastic.joining.learner import Taught
from paceline.elastic.joining.priority import at_low_priority
from paceline.elastic.joining.steps import Steps
from paceline.elastic.joining.wire import Entered, Result, Stepped
from paceline.elastic.messages import View
from paceline.elastic.registry import Registry

_LARGE = 128 << 20  # bytes of a state, of whose parts a digest takes more than a millisecond
_SMALL = 16 << 20  # bytes of a state of which a digest takes some 2 ms, for which the others may wait
_COMPARING_S = 2.0  # how long a learner that has caught up stays away until all parts were compared


class Following(Learning):
    """Makes the others' steps until they let this worker in.

    Args:
        connection: the worker's connection to its launcher.
        taught: what the donors have given; the state has been taken over.
        enter: enters a view.
        end: ends this worker, for a reason and with an exit code.
        registry: the state.
        steps: those of the optimizers.

    Attributes:
        holds: the round before which this worker has the whole state, FRESH while it lacks a part.
        has_strayed: its state is not that of the others, or cannot become so.
    """

    def __init__(
        self,
        connection: LauncherConnection,
        taught: Taught,
        enter: Callable[[View], None],
        end: Callable[[str, int], NoReturn],
        registry: Registry,
        steps: Steps,
    ) -> None:
        super().__init__(connection, taught, enter, end)
        self._registry, self._steps = registry, steps
        nbytes = registry.nbytes
        self._is_small = nbytes <= _SMALL
        self._course = Course(taught.contents.round, taught.contents.committed, WINDOWS, is_large=nbytes > _LARGE)
        self._caught_up_s: float | None = None
        self.holds = FRESH
        self.has_strayed = False

    def status(self, dealt: Dealt) -> Status:
        """Returns what this worker says about itself when it enters a view."""
        windows = range(WINDOWS) if self._is_small else sorted(self._course.unchecked)
        parts = tuple((window, self._registry.rolling_digest(window)) for window in windows)
        return Status(self._course.round, dealt=dealt, committed=self._course.committed, has_followed=True, parts=parts)

    def until_admitted(self) -> None:
        """Returns when this worker is in a view with the others.

        Raises:
            StrayedError: its state is not that of the others.
            LostDonorsError: nobody serves the steps any more.
        """
        try:
            while True:
                entered = at_low_priority(lambda: self._until_next_view(or_near=True)) or self._until_next_view()
                assert entered is not None
                if self._connection.name not in entered.members:
                    continue
                if self._comes_in(entered.generation, lambda: self.holds):
                    return
                self.holds = FRESH
                if self.has_strayed:
                    raise StrayedError("the others have gone on without it")
                self._replay.was_left_out()
        except StrayedError as error:
            self.strays(str(error))
            raise
        finally:
            self._replay.close()

    def strays(self, reason: str) -> None:
        """Says why this worker needs the whole state, for which the others have to wait, unless it has said so."""
        if not self.has_strayed:
            self.has_strayed = True
            sys.stderr.write(f"paceline: {self._connection} needs the whole state, and the others wait: {reason}\n")

    def _may_come(self) -> bool:
        """Whether what the others would have to compare when this worker enters a view is done, or takes too long."""
        if self._caught_up_s is None:
            self._caught_up_s = time.monotonic()
        is_compared = self._is_small or not self._course.unchecked
        return is_compared or time.monotonic() - self._caught_up_s > _COMPARING_S

    def _until_next_view(self, *, or_near: bool = False) -> Entered | None:
        """Makes the steps that precede the next view of the others; with `or_near`, only until it is near to them.

        When it is near, it makes as many steps as the others, and in the next view they wait until it has made the
        last one before. So it does that at its usual priority.
        """
        while not (or_near and self._replay.is_near):
            self._check()
            item, values = self._replay.follow(self._course.round)
            match item:
                case Stepped():
                    self._course.steps(item)
                    self._steps.again(item, values)
                    reach("join.replay")
                case Result():
                    compares = self._course.compares(item.round)
                    self._course.passes(item, self._registry.rolling_digest(item.round) if compares else None)
                case Entered():
                    return item
        return None
