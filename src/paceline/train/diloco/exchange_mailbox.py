"""ExchangeMailbox: passes tensors between the training thread and the exchange thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.train.diloco.exchange_timetable import FINISHED

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class ExchangeResult:
    """The result of an exchange.

    Attributes:
        exchange: the exchange number.
        mean: the means over the participating ranks.
        took_part: whether this rank participated.
    """

    exchange: int
    mean: Tensors
    took_part: bool


class MailboxClosedError(Exception):
    """Raised on the exchange thread when the mailbox was closed because training needs no further exchanges."""


class ExchangeMailbox:
    """Stores this rank's tensors until they are exchanged, and results until the training loop consumes them.

    Args:
        number: the index of the first exchange.
    """

    def __init__(self, number: int) -> None:
        self.changed = threading.Condition()
        self.decided = number  # all exchanges before this one have been decided
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

        Raises:
            TimeoutError: the result did not arrive in time.
            BaseException: the exchange thread failed with this error.
        """
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while True:
                if number in self._outcomes:
                    return self._outcomes.pop(number)
                if self._error is not None:
                    raise self._error
                if self._have_all_finished:
                    return None
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self.changed.wait(left_s)

    def close(self) -> None:
        """Wakes and stops the exchange thread; idempotent."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    # - Methods for the exchange thread

    def pause(self, seconds: float | None) -> None:
        """Waits up to `seconds`, or indefinitely if None, for a change; the caller holds `changed`.

        Raises:
            MailboxClosedError: the mailbox was closed.
        """
        if self._is_closed:
            raise MailboxClosedError
        self.changed.wait(seconds)

    def latest_offer_from(self, number: int) -> int | None:
        """Returns the latest started exchange if `number` has started, else FINISHED if training is complete, or None.

        The caller holds `changed`.
        """
        if number in self._offers:
            return self._latest
        return FINISHED if self._has_finished else None

    def take(self, number: int, takes_part: bool, blank: Callable[[], Tensors]) -> Tensors:
        """Removes and returns this rank's tensors for a decided exchange, or zeros if the rank does not participate."""
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
