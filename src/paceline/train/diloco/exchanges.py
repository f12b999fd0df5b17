"""Exchanges of outer gradients, which go on while the ranks train.

How ranks learn who takes part in an exchange: by waiting for all of them, or by a roll that one of them calls.

Averages outer gradients over those ranks that take part in an exchange.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch

from paceline.comm.engine.codes import ReduceOp
from paceline.comm.group.compression import Wire, WireKind
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.durations import to_seconds
from paceline.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError
from paceline.train.ddp.error_text import add_context
from paceline.train.diloco.exchange_mailbox import ExchangeMailbox, ExchangeResult, MailboxClosedError, Tensors
from paceline.train.diloco.exchange_timetable import FINISHED, ArrivalTracker, Participants, participants_after_waiting
from paceline.train.module_tensors import broadcast_tensors

_ARRIVALS, _VERDICTS = 1, 2  # tags
_CALLER = 0  # the rank that calls the roll
_EVER = timedelta.max  # a round takes as long as it takes, and a rank that dies ends the wait


class ParticipantPolicy(Protocol):
    """Says who takes part in each exchange."""

    def came(self, number: int) -> None:
        """Tells the others that this rank has come to an exchange, or is FINISHED; the training calls this."""
        ...

    def is_sure(self, number: int) -> bool:
        """Returns whether this rank takes part in an exchange whatever the verdict, which the thread asks for next."""
        ...

    def verdict(self, number: int) -> Participants:
        """Waits for the verdict about an exchange; the thread calls this."""
        ...


class WaitForAll:
    """Waits for all ranks that have not finished.

    Those that come need not wait for the verdict before they send what they have: it comes while they exchange that, in
    `group`, in which there are no other calls.
    """

    def __init__(self, group: ProcessGroup, desk: ExchangeMailbox) -> None:
        self._group, self._desk = group, desk
        self._mine = FINISHED  # what this rank tells the others

    def came(self, number: int) -> None:
        """Does nothing: the ranks ask each other when they are there."""

    def is_sure(self, number: int) -> bool:
        """Waits until this rank has come, and returns True; or until it has finished, and returns False."""
        desk = self._desk
        with desk.changed:
            while (mine := desk.latest_offer_from(number)) is None:
                desk.pause(None)
        self._mine = FINISHED if mine == FINISHED else number
        return mine != FINISHED

    def verdict(self, number: int) -> Participants:
        """Returns who takes part, once each rank has come or finished.

        Raises:
            CollectiveMismatchError: the ranks have come to different exchanges.
            CollectiveTimeoutError: a rank did not come within the group's time-out.
        """
        numbers = torch.zeros(self._group.size(), dtype=torch.int64)
        self._group.all_gather(list(numbers.split(1)), torch.tensor([self._mine]))
        try:
            return participants_after_waiting(numbers.tolist())
        except ValueError as error:
            raise CollectiveMismatchError(
                f"rank {self._group.me.rank}: the ranks hold different exchanges; {error}. Make DiLoCo with the same "
                "arguments, load the same state on every rank, and call step() after each inner step"
            ) from None


class GraceWindow:
    """Rank 0 calls the roll, and does not wait for ranks that come later than the grace window allows.

    The others tell it when they have come to an exchange, or finished, and wait for its verdicts on their threads.
    """

    def __init__(self, group: ProcessGroup, grace_s: float, desk: ExchangeMailbox, number: int) -> None:
        self._group, self._desk = group, desk
        self._sent: list[Work] = []
        self._roll = ArrivalTracker(group.size(), grace_s, number)
        self._calls = group.rank() == _CALLER
        self._arrivals: dict[int, tuple[torch.Tensor, Work]] = {}
        if self._calls:
            for rank in range(1, group.size()):
                self._listen_to(rank)

    def came(self, number: int) -> None:
        """Tells rank 0 that this rank has come to an exchange, or is FINISHED."""
        if not self._calls:
            self._sent = [work for work in self._sent if not work.is_completed()]
            self._send(torch.tensor([number]), _CALLER, _ARRIVALS)

    def is_sure(self, number: int) -> bool:
        """Returns False: who comes late takes no part."""
        return False

    def verdict(self, number: int) -> Participants:
        """Returns who takes part: all that came within the grace window of the first one.

        Raises:
            PeerLostError: a rank died.
        """
        if not self._calls:
            told = torch.zeros(self._group.size() + 1, dtype=torch.int64)
            self._group.recv(told, _CALLER, _VERDICTS, async_op=False, timeout=_EVER)
            is_final, *takes_part = [bool(each) for each in told.tolist()]
            return Participants(tuple(takes_part), is_final)
        verdict = self._call()
        told = torch.tensor([verdict.is_final, *verdict.takes_part], dtype=torch.int64)
        for rank in range(1, self._group.size()):
            self._send(told, rank, _VERDICTS)
        for work in self._sent:
            work.wait()
        self._sent = []
        return verdict

    def _call(self) -> Participants:
        desk = self._desk
        with desk.changed:
            while True:
                now_s = time.monotonic()
                self._take_arrivals(now_s)
                verdict = self._roll.call(now_s)
                if verdict is not None:
                    return verdict
                due_s = self._roll.due_s()
                desk.pause(None if due_s is None else max(0.0, due_s - now_s))

    def _take_arrivals(self, now_s: float) -> None:
        mine = self._desk.latest_offer_from(self._roll.number)
        if mine is not None:
            self._roll.came(_CALLER, mine, now_s)
        for rank, (told, work) in list(self._arrivals.items()):
            if not work.is_completed():
                continue
            work.wait()
            number = int(told)
            self._roll.came(rank, number, now_s)
            del self._arrivals[rank]
            if number != FINISHED:
                self._listen_to(rank)

    def _listen_to(self, rank: int) -> None:
        told = torch.zeros(1, dtype=torch.int64)
        work = self._group.recv(told, rank, _ARRIVALS, async_op=True, timeout=_EVER)
        self._arrivals[rank] = told, work
        work.when_over(self._wake)

    def _wake(self) -> None:
        with self._desk.changed:
            self._desk.changed.notify_all()

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        work = self._group.send(tensor, rank, tag, async_op=True, timeout=_EVER)
        assert work is not None
        self._sent.append(work)


class OuterAverager:
    """Averages tensors in place, of which a rank that takes no part gives zeros.

    The first tensor of a fragment is the outer gradient. It is rounded between hosts if there is a `wire`, and what the
    rounding has lost is added in the fragment's next exchange. Others, such as the values of buffers, are sent as they
    are.
    """

    def __init__(self, wire: WireKind | None) -> None:
        self._kind = wire
        self._wires: dict[int, Wire] = {}

    def begin(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor]) -> list[Work]:
        """Begins to add up a fragment's tensors over the ranks of `group`."""
        gradient, *others = tensors
        works = [group.all_reduce(gradient, async_op=True, wire=self._wire_of(fragment))]
        works += [group.all_reduce(tensor, async_op=True) for tensor in others]
        return [work for work in works if work is not None]

    def end(self, works: list[Work], tensors: list[torch.Tensor], parts: int) -> None:
        """Waits for sums that `begin` began, and divides them by the number of ranks that took part."""
        for work in works:
            work.wait()
        for tensor in tensors:
            tensor.div_(parts)

    def average(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor], parts: int) -> None:
        """Averages a fragment's tensors over `parts` ranks of `group`, all of which call this."""
        self.end(self.begin(group, fragment, tensors), tensors, parts)

    def _wire_of(self, fragment: int) -> Wire | None:
        if self._kind is None:
            return None
        return self._wires.setdefault(fragment, Wire(self._kind))


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

    def outcome(self, number: int) -> ExchangeResult:
        """Returns the outcome of an exchange that has begun."""
        ...

    def leave(self, begun: range) -> Iterator[ExchangeResult]:
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

    def outcome(self, number: int) -> ExchangeResult:
        """Returns the offer as the mean."""
        return ExchangeResult(number, self._offers.pop(number), took_part=True)

    def leave(self, begun: range) -> Iterator[ExchangeResult]:
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
        averaging: OuterAverager,
        fragment_of: Callable[[int], int],
        blank: Callable[[int], Tensors],
    ) -> None:
        self._group, self._arrivals, self._grace_s = group, arrivals, grace_s
        self._averaging = averaging
        self._fragment_of, self._blank = fragment_of, blank
        self._desk = ExchangeMailbox(0)
        self._attendance: ParticipantPolicy | None = None
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

    def outcome(self, number: int) -> ExchangeResult:
        """Returns the outcome of an exchange that has begun, here or elsewhere.

        Raises:
            CollectiveError: the exchange failed.
        """
        found = self._await(number)
        assert found is not None, "all ranks have left before an exchange that this rank has begun"
        return found

    def leave(self, begun: range) -> Iterator[ExchangeResult]:
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

    def _opened(self) -> ExchangeMailbox:
        """Returns the desk, after starting a thread that serves it if there is none."""
        if self._attendance is None:
            desk = self._desk = ExchangeMailbox(self._next)
            if self._grace_s is None:
                self._attendance = WaitForAll(self._arrivals, desk)
            else:
                self._attendance = GraceWindow(self._arrivals, self._grace_s, desk, self._next)
            arguments = desk, self._attendance, self._next
            threading.Thread(target=self._serve, args=arguments, name="paceline-outer", daemon=True).start()
        return self._desk

    def _serve(self, desk: ExchangeMailbox, attendance: ParticipantPolicy, number: int) -> None:
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
                desk.give(ExchangeResult(number, tensors, takes_part))
                number += 1
            desk.end(None)
        except MailboxClosedError:
            pass
        except Exception as error:
            if isinstance(error, CollectiveError):
                fragment = self._fragment_of(number)
                add_context(error, f"This was exchange {number} of outer gradients, of fragment {fragment}")
            desk.end(error)

    def _begin(self, desk: ExchangeMailbox, number: int, takes_part: bool) -> tuple[list[Work], Tensors]:
        """Begins to add up what the ranks give to an exchange."""
        fragment = self._fragment_of(number)
        tensors = desk.take(number, takes_part, partial(self._blank, fragment))
        return self._averaging.begin(self._group, fragment, tensors), tensors

    def _await(self, number: int) -> ExchangeResult | None:
        limit_s = 2 * to_seconds(self._group.timeout) + (self._grace_s or 0) + _SLACK_S
        try:
            return self._opened().await_outcome(number, limit_s)
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"rank {self._group.me.rank}: exchange {number} of outer gradients was not over after {limit_s:.0f} s, "
                f"twice the group's time-out. Rank {self._group.ranks[0]}, which says who takes part, may be stopped"
            ) from None
