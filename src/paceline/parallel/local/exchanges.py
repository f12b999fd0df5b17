"""Exchanges of outer gradients, which go on while the ranks train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from paceline.durations import to_seconds
from paceline.errors import CollectiveError, CollectiveTimeoutError
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.work import Work
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.ddp.error_text import add_context
from paceline.parallel.local.attendance import Attendance, Everyone, RollCall
from paceline.parallel.local.averaging import Averaging
from paceline.parallel.local.desk import Desk, DeskClosedError, Outcome, Tensors
from paceline.parallel.local.roll import FINISHED

_SLACK_S = 10.0  # by which the training waits longer than the thread, whose errors say more


class Exchanges(Protocol):
    """Who averages the outer gradients, and how."""

    def start(self, number: int) -> None:
        """Makes `number` the next exchange."""
        ...

    def decided(self) -> int:
        """Returns how many exchanges have been decided, with this rank or without."""
        ...

    def begin(self, number: int, offer: Tensors) -> None:
        """Begins an exchange, in which `offer` is averaged."""
        ...

    def outcome(self, number: int) -> Outcome:
        """Returns the outcome of an exchange that has begun."""
        ...

    def leave(self, begun: range) -> Iterator[Outcome]:
        """Yields the outcomes of exchanges that have begun, and of those that there are until all ranks have left."""
        ...

    def mean(self, fragment: int, offer: Tensors) -> Tensors:
        """Returns a mean over all ranks, which have all left."""
        ...

    def most(self, number: int) -> int:
        """Returns the largest of the ranks' numbers, all of which have left."""
        ...

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the first rank's tensors to all, all of which have left."""
        ...


class NoExchanges:
    """A rank that is alone: the mean is what it offers."""

    def __init__(self) -> None:
        self._offers: dict[int, Tensors] = {}

    def start(self, number: int) -> None:
        """Forgets what has begun."""
        self._offers.clear()

    def decided(self) -> int:
        """Returns 0, since nobody decides without this rank."""
        return 0

    def begin(self, number: int, offer: Tensors) -> None:
        """Keeps the offer."""
        self._offers[number] = offer

    def outcome(self, number: int) -> Outcome:
        """Returns the offer as the mean."""
        return Outcome(number, self._offers.pop(number), took_part=True)

    def leave(self, begun: range) -> Iterator[Outcome]:
        """Yields what has begun."""
        for number in begun:
            yield self.outcome(number)

    def mean(self, fragment: int, offer: Tensors) -> Tensors:
        """Returns the offer."""
        return offer

    def most(self, number: int) -> int:
        """Returns the number."""
        return number

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Does nothing."""


class BackgroundExchanges:
    """Exchanges that run on a thread, in groups that nothing else uses.

    The thread takes part in exchanges for a training that is late, or has finished, so that nobody waits for that.

    Args:
        group: the ranks; calls of other threads must not come between those of the exchanges.
        arrivals: the same ranks, which tell each other there who has come.
        grace_s: how long an exchange waits for late ranks; None to wait for all.
        averaging: averages over the ranks.
        fragment_of: returns the fragment of an exchange.
        blank: returns zeros of the form of an offer for a fragment.
    """

    def __init__(
        self,
        group: ProcessGroup,
        arrivals: ProcessGroup,
        grace_s: float | None,
        averaging: Averaging,
        fragment_of: Callable[[int], int],
        blank: Callable[[int], Tensors],
    ) -> None:
        self._group, self._arrivals, self._grace_s = group, arrivals, grace_s
        self._averaging = averaging
        self._fragment_of, self._blank = fragment_of, blank
        self._desk = Desk(0)
        self._attendance: Attendance | None = None
        self._next = 0

    def start(self, number: int) -> None:
        """Makes `number` the next exchange.

        Raises:
            RuntimeError: exchanges have begun since the last time that all ranks left.
        """
        if self._attendance is not None:
            raise RuntimeError(
                f"rank {self._group.me.rank}: a state was loaded after steps, while other ranks may wait for their "
                "exchanges; load it before the first step(), or call finish() on every rank before"
            )
        self._next = number

    def decided(self) -> int:
        """Returns how many exchanges have been decided, with this rank or without.

        From the first call on, the thread takes part in exchanges.
        """
        return self._opened().decided

    def begin(self, number: int, offer: Tensors) -> None:
        """Begins an exchange."""
        if self._opened().offer(number, offer):
            assert self._attendance is not None
            self._attendance.came(number)

    def outcome(self, number: int) -> Outcome:
        """Returns the outcome of an exchange that has begun, here or elsewhere.

        Raises:
            CollectiveError: the exchange failed.
        """
        found = self._await(number)
        assert found is not None, "all ranks have left before an exchange that this rank has begun"
        return found

    def leave(self, begun: range) -> Iterator[Outcome]:
        """Yields the outcomes of what has begun here, and then of what other ranks do until they have left too."""
        desk = self._opened()
        desk.finish()
        assert self._attendance is not None
        self._attendance.came(FINISHED)
        number = begun.start
        while (outcome := self._await(number)) is not None:
            yield outcome
            number += 1
        self._next, self._attendance = number, None

    def mean(self, fragment: int, offer: Tensors) -> Tensors:
        """Returns a mean over all ranks, which have all left."""
        self._averaging.average(self._group, fragment, offer, self._group.size())
        return offer

    def most(self, number: int) -> int:
        """Returns the largest of the ranks' numbers."""
        largest = torch.tensor([number])
        self._group.all_reduce(largest, ReduceOp.MAX)
        return int(largest)

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the first rank's tensors to all."""
        broadcast_tensors(list(tensors), self._group)

    def close(self) -> None:
        """Ends the thread and the groups; idempotent."""
        self._desk.close()
        self._group.close()
        self._arrivals.close()

    def _opened(self) -> Desk:
        """Returns the desk, after starting a thread that serves it if there is none."""
        if self._attendance is None:
            desk = self._desk = Desk(self._next)
            if self._grace_s is None:
                self._attendance = Everyone(self._arrivals, desk)
            else:
                self._attendance = RollCall(self._arrivals, self._grace_s, desk, self._next)
            arguments = desk, self._attendance, self._next
            threading.Thread(target=self._serve, args=arguments, name="paceline-outer", daemon=True).start()
        return self._desk

    def _serve(self, desk: Desk, attendance: Attendance, number: int) -> None:
        """Runs the exchanges from `number` on, until all ranks have finished."""
        rank = self._group.rank()
        try:
            while True:
                begun = self._begin(desk, number, True) if attendance.is_sure(number) else None
                verdict = attendance.verdict(number)
                if verdict.is_final:
                    break
                takes_part = verdict.takes_part[rank]
                works, tensors = begun if begun is not None else self._begin(desk, number, takes_part)
                self._averaging.end(works, tensors, sum(verdict.takes_part))
                desk.give(Outcome(number, tensors, takes_part))
                number += 1
            desk.end(None)
        except DeskClosedError:
            pass
        except Exception as error:
            if isinstance(error, CollectiveError):
                fragment = self._fragment_of(number)
                add_context(error, f"This was exchange {number} of outer gradients, of fragment {fragment}")
            desk.end(error)

    def _begin(self, desk: Desk, number: int, takes_part: bool) -> tuple[list[Work], Tensors]:
        """Begins to add up what the ranks give to an exchange."""
        fragment = self._fragment_of(number)
        tensors = desk.take(number, takes_part, partial(self._blank, fragment))
        return self._averaging.begin(self._group, fragment, tensors), tensors

    def _await(self, number: int) -> Outcome | None:
        limit_s = 2 * to_seconds(self._group.timeout) + (self._grace_s or 0) + _SLACK_S
        try:
            return self._opened().await_outcome(number, limit_s)
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"rank {self._group.me.rank}: exchange {number} of outer gradients was not over after {limit_s:.0f} s, "
                f"twice the group's time-out. Rank {self._group.ranks[0]}, which says who takes part, may be stopped"
            ) from None
