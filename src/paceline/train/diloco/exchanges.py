"""Exchanges of outer gradients on a background thread, with two policies for late ranks.

`WaitForAll` waits for all ranks. With `GraceWindow`, rank 0 selects the ranks that arrive in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.compression import Wire, WireKind
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.durations import to_seconds
from paceline.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError
from paceline.train.ddp.error_text import add_context
from paceline.train.diloco.exchange_scheduler import FINISHED, ArrivalTracker, Participants, participants_after_waiting
from paceline.train.module_tensors import broadcast_tensors

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class ExchangeResult:
    """The result of an exchange."""

    exchange: int  # the exchange number
    mean: Tensors  # the means over the participating ranks
    took_part: bool  # whether this rank participated


class MailboxClosedError(Exception):
    """Raised on the exchange thread when the mailbox has been closed because training needs no further exchanges."""


class ExchangeMailbox:
    """Stores this rank's tensors until they are exchanged, and results until the training loop consumes them.

    `number` is the index of the first exchange.
    """

    def __init__(self, number: int) -> None:
        self.changed = threading.Condition()
        self.decided = number  # the participants of all exchanges before this one are known
        self._have_all_finished = False
        self._latest = number - 1  # the latest exchange that the training thread has started
        self._has_finished = False  # whether the training thread has started its last exchange
        self._offers: dict[int, Tensors] = {}
        self._outcomes: dict[int, ExchangeResult] = {}
        self._error: BaseException | None = None
        self._is_closed = False

    # - Methods for the training thread

    def offer(self, number: int, tensors: Tensors) -> bool:
        """Stores this rank's tensors for an exchange; returns False if the exchange was decided without this rank."""
        with self.changed:
            self._latest = number
            if number < self.decided:
                return False
            self._offers[number] = tensors
            self.changed.notify_all()
            return True

    def finish(self) -> None:
        """Records that the training thread has started its last exchange."""
        with self.changed:
            self._has_finished = True
            self.changed.notify_all()

    def await_outcome(self, number: int, timeout_s: float) -> ExchangeResult | None:
        """Waits for the result of an exchange; returns None if all ranks finished before this exchange.

        Raises TimeoutError if the result does not arrive in time, or the error with which the exchange thread failed.
        """

        def is_over() -> bool:
            return number in self._outcomes or self._error is not None or self._have_all_finished

        with self.changed:
            if not self.changed.wait_for(is_over, timeout_s):
                raise TimeoutError
            if number not in self._outcomes and self._error is not None:
                raise self._error
            return self._outcomes.pop(number, None)

    def close(self) -> None:
        """Wakes and stops the exchange thread; idempotent."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    # - Methods for the exchange thread

    def pause(self, seconds: float | None) -> None:
        """Waits up to `seconds` for a change, or indefinitely if `seconds` is None; the caller must hold `changed`.

        Raises MailboxClosedError if the mailbox was closed.
        """
        if self._is_closed:
            raise MailboxClosedError
        self.changed.wait(seconds)

    def latest_offer_from(self, number: int) -> int | None:
        """Returns the latest exchange that this rank has started, if exchange `number` has started.

        Otherwise, returns FINISHED if training is complete and None if it is not. The caller must hold `changed`.
        """
        if number in self._offers:
            return self._latest
        return FINISHED if self._has_finished else None

    def take(self, number: int, takes_part: bool, blank: Callable[[], Tensors]) -> Tensors:
        """Removes and returns this rank's tensors for an exchange; returns zeros if the rank does not participate."""
        with self.changed:
            self.decided = number + 1
            offer = self._offers.pop(number, None)
        return offer if takes_part and offer is not None else blank()

    def give(self, outcome: ExchangeResult) -> None:
        """Stores the result of an exchange for the training thread."""
        with self.changed:
            self._outcomes[outcome.exchange] = outcome
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Records that no further exchanges will run, either because of `error` or because all ranks have finished."""
        with self.changed:
            self._have_all_finished, self._error = error is None, error
            self.changed.notify_all()


_ARRIVALS, _DECISIONS = 1, 2  # message tags
_DECIDER = 0  # the rank that selects participants
_NEVER = timedelta.max  # the time until the next exchange is unbounded; if a rank dies, the wait fails anyway
# the training thread times out this much later than the exchange thread, whose error message is more precise
_SLACK_S = 10.0


class WaitForAll:
    """Waits for all ranks that have not finished.

    A rank that has arrived starts sending its tensors while the ranks report their arrivals through `group`, which is
    used for nothing else. The training thread calls `arrived`. For each exchange, the exchange thread calls
    `is_certain` and then `participants`.
    """

    def __init__(self, group: ProcessGroup, mailbox: ExchangeMailbox) -> None:
        self._group, self._mailbox = group, mailbox
        self._own_number = FINISHED  # the number that this rank sends

    def arrived(self, number: int) -> None:
        """Does nothing, because `participants` gathers the arrivals."""

    def is_certain(self, number: int) -> bool:
        """Waits until this rank has arrived or finished, and returns whether it has arrived."""
        mailbox = self._mailbox
        with mailbox.changed:
            while (latest := mailbox.latest_offer_from(number)) is None:
                mailbox.pause(None)
        self._own_number = FINISHED if latest == FINISHED else number
        return latest != FINISHED

    def participants(self, number: int) -> Participants:
        """Waits until each rank has arrived or finished, and returns the participants.

        Raises CollectiveMismatchError if the ranks have arrived at different exchanges.
        """
        numbers = torch.zeros(self._group.size(), dtype=torch.int64, device="cpu")
        self._group.all_gather(list(numbers.split(1)), torch.tensor([self._own_number], device="cpu"))
        try:
            return participants_after_waiting(numbers.tolist())
        except ValueError as error:
            raise CollectiveMismatchError(
                f"rank {self._group.me.rank}: the ranks hold different exchanges; {error}. Create DiLoCo with the same "
                "arguments, load the same state on every rank, and call step() after each inner step"
            ) from None


class GraceWindow:
    """Excludes ranks that arrive after the grace window, which starts at the first arrival and is enforced by rank 0.

    The other ranks report their arrivals to rank 0, and their exchange threads wait for its decisions. The methods are
    called as in `WaitForAll`.
    """

    def __init__(self, group: ProcessGroup, grace_s: float, mailbox: ExchangeMailbox, number: int) -> None:
        self._group, self._mailbox = group, mailbox
        self._sent: list[Work] = []
        self._tracker = ArrivalTracker(group.size(), grace_s, number)
        self._decides = group.rank() == _DECIDER
        self._arrivals: dict[int, tuple[torch.Tensor, Work]] = {}
        if self._decides:
            for rank in range(1, group.size()):
                self._receive_from(rank)

    def arrived(self, number: int) -> None:
        """Reports this rank's arrival at an exchange, or FINISHED, to rank 0."""
        if not self._decides:
            self._sent = [work for work in self._sent if not work.is_completed()]
            self._send(torch.tensor([number], device="cpu"), _DECIDER, _ARRIVALS)

    def is_certain(self, number: int) -> bool:
        """Returns False, because a late rank may be excluded."""
        return False

    def participants(self, number: int) -> Participants:
        """Returns the ranks that arrived within the grace window."""
        if not self._decides:
            decision = torch.zeros(self._group.size() + 1, dtype=torch.int64, device="cpu")
            self._group.recv(decision, _DECIDER, _DECISIONS, async_op=False, timeout=_NEVER)
            is_final, *takes_part = map(bool, decision.tolist())
            return Participants(tuple(takes_part), is_final)
        decided = self._decide()
        decision = torch.tensor([decided.is_final, *decided.takes_part], dtype=torch.int64, device="cpu")
        for rank in range(1, self._group.size()):
            self._send(decision, rank, _DECISIONS)
        for work in self._sent:
            work.wait()
        self._sent = []
        return decided

    def _decide(self) -> Participants:
        with self._mailbox.changed:
            while True:
                now_s = time.monotonic()
                self._take_arrivals(now_s)
                if (decided := self._tracker.decide(now_s)) is not None:
                    return decided
                due_s = self._tracker.due_s()
                self._mailbox.pause(None if due_s is None else max(0.0, due_s - now_s))

    def _take_arrivals(self, now_s: float) -> None:
        latest = self._mailbox.latest_offer_from(self._tracker.number)
        if latest is not None:
            self._tracker.arrived(_DECIDER, latest, now_s)
        for rank, (received, work) in list(self._arrivals.items()):
            if not work.is_completed():
                continue
            work.wait()
            number = int(received)
            self._tracker.arrived(rank, number, now_s)
            del self._arrivals[rank]
            if number != FINISHED:
                self._receive_from(rank)

    def _receive_from(self, rank: int) -> None:
        number = torch.zeros(1, dtype=torch.int64, device="cpu")
        work = self._group.recv(number, rank, _ARRIVALS, async_op=True, timeout=_NEVER)
        self._arrivals[rank] = number, work
        work.when_over(self._wake)

    def _wake(self) -> None:
        with self._mailbox.changed:
            self._mailbox.changed.notify_all()

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        work = self._group.send(tensor, rank, tag, async_op=True, timeout=_NEVER)
        assert work is not None
        self._sent.append(work)


class OuterAverager:
    """Averages tensors in place over the participating ranks; the other ranks pass zeros.

    A fragment's first tensor is its outer gradient. With a `wire`, the gradient is rounded between hosts, and the
    rounding error is carried over to the fragment's next exchange. All other tensors, such as buffer values, are sent
    unrounded.
    """

    def __init__(self, wire: WireKind | None) -> None:
        self._kind = wire
        self._wires: dict[int, Wire] = {}

    def begin(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor]) -> list[Work]:
        """Starts summing a fragment's tensors over the ranks in `group`."""
        gradient, *others = tensors
        works = [group.all_reduce(gradient, async_op=True, wire=self._wire_of(fragment))]
        works += [group.all_reduce(tensor, async_op=True) for tensor in others]
        return [work for work in works if work is not None]

    def end(self, works: list[Work], tensors: list[torch.Tensor], parts: int) -> None:
        """Waits for the sums that `begin` started, and divides them by `parts`, the number of participating ranks."""
        for work in works:
            work.wait()
        for tensor in tensors:
            tensor.div_(parts)

    def average(self, group: ProcessGroup, fragment: int, tensors: list[torch.Tensor], parts: int) -> None:
        """Averages a fragment's tensors over `parts` participants; all ranks in `group` must call this method."""
        self.end(self.begin(group, fragment, tensors), tensors, parts)

    def _wire_of(self, fragment: int) -> Wire | None:
        return None if self._kind is None else self._wires.setdefault(fragment, Wire(self._kind))


class Exchanges:
    """Averages outer gradients over a set of ranks. In this base class, the set consists of this rank alone."""

    def __init__(self) -> None:
        self._offers: dict[int, Tensors] = {}

    def start(self, number: int) -> None:
        """Sets the index of the next exchange, and discards the exchanges that have started."""
        self._offers.clear()

    def decided(self) -> int:
        """Returns the number of exchanges whose participants are known, or 0 if they always include this rank."""
        return 0

    def begin(self, number: int, offer: Tensors) -> None:
        """Starts an exchange to which this rank contributes `offer`."""
        self._offers[number] = offer

    def outcome(self, number: int) -> ExchangeResult:
        """Waits for the result of an exchange that has started."""
        return ExchangeResult(number, self._offers.pop(number), took_part=True)

    def leave(self, begun: range) -> Iterator[ExchangeResult]:
        """Yields the results of all exchanges that any rank has started, until every rank has left."""
        for number in begun:
            yield self.outcome(number)

    def mean(self, fragment: int, offer: Tensors) -> Tensors:
        """Returns the mean of the ranks' tensors; called after `leave` has ended."""
        return offer

    def most(self, number: int) -> int:
        """Returns the maximum of `number` over all ranks; called after `leave` has ended."""
        return number

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the first rank's tensors to all ranks; called after `leave` has ended."""


class BackgroundExchanges(Exchanges):
    """Runs exchanges on a background thread, in dedicated process groups.

    While this rank lags behind in training, or after it has finished, the thread contributes zeros to the collectives
    of other ranks' exchanges, so that these exchanges need not wait.

    Args:
        group: the process group for the exchanges; no other thread may use it.
        arrivals: a second process group with the same ranks, for arrival reports.
        grace_s: the time that an exchange waits for late ranks. If None, exchanges wait for all ranks.
        averaging: the object that averages tensors over the ranks.
        fragment_of: a function that returns the fragment that an exchange transfers, given the number of the exchange.
        blank: a function that returns zeros with the dtypes and shapes of a fragment's offer.
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
        super().__init__()
        self._group, self._arrivals, self._grace_s = group, arrivals, grace_s
        self._averaging = averaging
        self._fragment_of, self._blank = fragment_of, blank
        self._mailbox = ExchangeMailbox(0)
        self._policy: WaitForAll | GraceWindow | None = None  # None while the exchange thread is not running
        self._next = 0

    def start(self, number: int) -> None:
        """Sets the index of the next exchange.

        Raises RuntimeError if the exchange thread is running, because not all ranks have left since it started.
        """
        if self._policy is not None:
            raise RuntimeError(
                f"rank {self._group.me.rank}: a state was loaded after steps, while other ranks may wait for their "
                "exchanges; load it before the first step(), or call finish() on every rank before"
            )
        self._next = number

    def decided(self) -> int:
        """Returns the number of exchanges whose participants are known, whether or not they include this rank.

        The first call starts the exchange thread.
        """
        return self._opened()[0].decided

    def begin(self, number: int, offer: Tensors) -> None:
        """Starts an exchange to which this rank contributes `offer`."""
        mailbox, policy = self._opened()
        if mailbox.offer(number, offer):
            policy.arrived(number)

    def outcome(self, number: int) -> ExchangeResult:
        """Waits for the result of an exchange that this rank or another rank has started."""
        found = self._await(number)
        assert found is not None, "all ranks have left before an exchange that this rank has begun"
        return found

    def leave(self, begun: range) -> Iterator[ExchangeResult]:
        """Yields the results of this rank's exchanges, and then other ranks' results until all ranks have left."""
        mailbox, policy = self._opened()
        mailbox.finish()
        policy.arrived(FINISHED)
        number = begun.start
        while (outcome := self._await(number)) is not None:
            yield outcome
            number += 1
        self._next, self._policy = number, None

    def mean(self, fragment: int, offer: Tensors) -> Tensors:
        """Returns the mean of the ranks' tensors; called after `leave` has ended."""
        self._averaging.average(self._group, fragment, offer, self._group.size())
        return offer

    def most(self, number: int) -> int:
        """Returns the maximum of `number` over all ranks."""
        largest = torch.tensor([number], device="cpu")
        self._group.all_reduce(largest, ReduceOp.MAX)
        return int(largest)

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the first rank's tensors to all ranks."""
        broadcast_tensors(list(tensors), self._group)

    def close(self) -> None:
        """Stops the exchange thread and closes both groups; idempotent."""
        self._mailbox.close()
        self._group.close()
        self._arrivals.close()

    def _opened(self) -> tuple[ExchangeMailbox, WaitForAll | GraceWindow]:
        """Returns the mailbox and the policy; starts the exchange thread if it is not running."""
        if self._policy is None:
            mailbox = self._mailbox = ExchangeMailbox(self._next)
            if self._grace_s is None:
                self._policy = WaitForAll(self._arrivals, mailbox)
            else:
                self._policy = GraceWindow(self._arrivals, self._grace_s, mailbox, self._next)
            arguments = mailbox, self._policy, self._next
            threading.Thread(target=self._serve, args=arguments, name="paceline-outer", daemon=True).start()
        return self._mailbox, self._policy

    def _serve(self, mailbox: ExchangeMailbox, policy: WaitForAll | GraceWindow, number: int) -> None:
        """Runs exchanges, starting with `number`, until all ranks have finished."""
        rank = self._group.rank()
        try:
            while True:
                begun = self._begin(mailbox, number, True) if policy.is_certain(number) else None
                decided = policy.participants(number)
                if decided.is_final:
                    break
                takes_part = decided.takes_part[rank]
                works, tensors = begun if begun is not None else self._begin(mailbox, number, takes_part)
                self._averaging.end(works, tensors, sum(decided.takes_part))
                mailbox.give(ExchangeResult(number, tensors, takes_part))
                number += 1
            mailbox.end(None)
        except MailboxClosedError:
            pass
        except Exception as error:
            if isinstance(error, CollectiveError):
                fragment = self._fragment_of(number)
                add_context(error, f"This was exchange {number} of outer gradients, for fragment {fragment}")
            mailbox.end(error)

    def _begin(self, mailbox: ExchangeMailbox, number: int, takes_part: bool) -> tuple[list[Work], Tensors]:
        """Starts summing the ranks' tensors for an exchange."""
        fragment = self._fragment_of(number)
        tensors = mailbox.take(number, takes_part, partial(self._blank, fragment))
        return self._averaging.begin(self._group, fragment, tensors), tensors

    def _await(self, number: int) -> ExchangeResult | None:
        limit_s = 2 * to_seconds(self._group.timeout) + (self._grace_s or 0) + _SLACK_S
        try:
            return self._opened()[0].await_outcome(number, limit_s)
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"rank {self._group.me.rank}: exchange {number} of outer gradients had not completed after "
                f"{limit_s:.0f} s, twice the group's timeout. Rank {self._group.ranks[0]}, which determines the "
                "participants, may be stopped"
            ) from None
