"""What the training and the thread that exchanges for it hand to each other."""

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
        exchange: its number.
        mean: the means over the ranks that took part.
        took_part: whether this rank did.
    """

    exchange: int
    mean: Tensors
    took_part: bool


class MailboxClosedError(Exception):
    """The training has no use for exchanges any more."""


class ExchangeMailbox:
    """Holds offers of the training until they are exchanged, and outcomes until they are used.

    Args:
        number: the first exchange.
    """

    def __init__(self, number: int) -> None:
        self.changed = threading.Condition()
        self.decided = number  # all exchanges before this one have been decided
        self.is_over = False  # all ranks have finished
        self._latest = number - 1  # the latest exchange that the training has come to
        self._has_finished = False  # the training comes to no other
        self._offers: dict[int, Tensors] = {}
        self._outcomes: dict[int, ExchangeResult] = {}
        self._error: BaseException | None = None
        self._is_closed = False

    # - The training's side

    def offer(self, number: int, tensors: Tensors) -> bool:
        """Leaves what this rank gives to an exchange; returns False if that was decided without it."""
        with self.changed:
            self._latest = number
            if number < self.decided:
                return False
            self._offers[number] = tensors
            self.changed.notify_all()
            return True

    def finish(self) -> None:
        """Says that this rank comes to no other exchange."""
        with self.changed:
            self._has_finished = True
            self.changed.notify_all()

    def await_outcome(self, number: int, timeout_s: float) -> ExchangeResult | None:
        """Returns the outcome of an exchange; None if all ranks have finished before it.

        Raises:
            TimeoutError: there was none in time.
            BaseException: the thread's error.
        """
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while True:
                if number in self._outcomes:
                    return self._outcomes.pop(number)
                if self._error is not None:
                    raise self._error
                if self.is_over:
                    return None
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self.changed.wait(left_s)

    def close(self) -> None:
        """Ends the thread's waits; idempotent."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    # - The thread's side

    def pause(self, seconds: float | None) -> None:
        """Waits for a change, up to so many seconds; `changed` is held.

        Raises:
            DeskClosedError: there is nothing to wait for any more.
        """
        if self._is_closed:
            raise MailboxClosedError
        self.changed.wait(seconds)

    def latest_offer_from(self, number: int) -> int | None:
        """Returns `number` or a later exchange if the training has come to it, FINISHED, or None; `changed` is held."""
        if number in self._offers:
            return self._latest
        return FINISHED if self._has_finished else None

    def take(self, number: int, takes_part: bool, blank: Callable[[], Tensors]) -> Tensors:
        """Returns what this rank gives to an exchange that has been decided: zeros if it does not take part."""
        with self.changed:
            self.decided = number + 1
            offer = self._offers.pop(number, None)
        return offer if takes_part and offer is not None else blank()

    def give(self, outcome: ExchangeResult) -> None:
        """Leaves the outcome of an exchange for the training."""
        with self.changed:
            self._outcomes[outcome.exchange] = outcome
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Says that there are no exchanges any more, because all have finished or because of an error."""
        with self.changed:
            self.is_over, self._error = error is None, error
            self.changed.notify_all()
