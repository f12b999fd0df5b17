"""A learner runs the script's loop on results that others have committed, until it has caught up with them."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.elastic.joining.wire import (
    NEAR,
    REQUEST,
    Ask,
    BrokenLessonError,
    Entered,
    Item,
    NothingYet,
    Result,
    Stepped,
    digest_of_chunk,
    receive_head,
    receive_into,
)
from paceline.parallel.digests import memory_of
from paceline.parallel.sharded.sums import Values
from paceline.security.encryption import Connection

_PATIENCE_S = 30.0  # how long a donor may take to go on with what it has begun to send
_LOOK_S = 0.1
_TRIES, _MORE_TRIES = 4, 16


@dataclass
class Pursuit:
    """Says when a learner is to be admitted.

    It is when it has caught up with the others, or when it never will, since its loop takes as long as theirs: then
    they wait for it, as long as it takes for what it is behind.

    >>> Pursuit().is_near(0), Pursuit().is_near(2)
    (True, False)
    """

    _first: int | None = None
    _taken: int = 0

    def is_near(self, behind: int) -> bool:
        """Takes how many results are left, after each that the learner gets; returns whether it is to be admitted."""
        if self._first is None:
            self._first = behind
        self._taken += 1
        return behind <= NEAR or self.is_hopeless

    @property
    def is_hopeless(self) -> bool:
        """Whether it has tried for so long that it is to be admitted in any case."""
        return self._first is not None and self._taken > _TRIES * self._first + _MORE_TRIES


class LostDonorsError(Exception):
    """Nobody serves the results any more."""


class Replay:
    """The results of the rounds from a snapshot on.

    Args:
        donors: connections to the donors' children, which have the same results.
        on_near: is called, with the round, whenever the learner is to be admitted.
        check: is called while there is nothing to do, and may raise an error.
        may_come: whether a learner that has caught up may be admitted; is called until it returns True.
    """

    def __init__(
        self,
        donors: list[Connection],
        on_near: Callable[[int], None],
        check: Callable[[], None],
        may_come: Callable[[], bool] = lambda: True,
    ) -> None:
        self._donors = donors
        self._on_near, self._check, self._may_come = on_near, check, may_come
        self._generation = 0  # the last view of which the learner knows that the others have entered it
        self._pursuit = Pursuit()
        self._is_near = False
        self._next: tuple[Result | Entered, Values] | None = None
        self._steps = 0  # of optimizers, since the round before

    @property
    def is_near(self) -> bool:
        """Whether the learner is to be admitted to the next view of the others."""
        return self._is_near

    def follow(self, round_number: int) -> tuple[Item, Values]:
        """Returns what happened next in the usual loop, until the result of the round: steps of optimizers too.

        Raises:
            LostDonorsError: no donor is left.
        """
        item, values = self._get(round_number)
        match item:
            case Stepped():
                self._steps += 1
            case Result():
                self._steps = 0
            case Entered():
                self._generation = item.generation
        return item, values

    def next(self, round_number: int) -> Result | Entered:
        """Returns what happened next to the members, who have finished all rounds before this one.

        Raises:
            LostDonorsError: no donor is left.
        """
        if self._next is None:
            item, values = self._get(round_number)
            assert not isinstance(item, Stepped), "the loop of logical shards has no such items"
            self._next = item, values
        item = self._next[0]
        if isinstance(item, Entered):
            self._generation = item.generation
            self._next = None
        return item

    def take(self, round_number: int) -> tuple[Result, Values]:
        """Returns the result of the round.

        Raises:
            LostDonorsError: no donor is left.
        """
        while not isinstance(self.next(round_number), Result):
            pass  # the members have entered a view in the middle of a batch, in which nobody comes in
        assert self._next is not None
        (item, values), self._next = self._next, None
        assert isinstance(item, Result)
        return item, values

    def was_left_out(self) -> None:
        """Notes that the view that was to admit the learner broke, so that it has to say again that it is near."""
        self._is_near = False

    def close(self) -> None:
        """Ends the lesson; idempotent."""
        for donor in self._donors:
            donor.close()
        self._donors.clear()

    def _get(self, round_number: int) -> tuple[Item, Values]:
        while self._donors:
            donor = self._donors[0]
            try:
                return self._get_from(donor, round_number)
            except (BrokenLessonError, OSError):
                donor.close()
                del self._donors[0]
        raise LostDonorsError(f"nobody serves the result of round {round_number} any more")

    def _get_from(self, donor: Connection, round_number: int) -> tuple[Item, Values]:
        donor.sendall(REQUEST.pack(Ask.ITEM, round_number, self._generation, self._steps))
        for other in self._donors[1:]:
            with contextlib.suppress(OSError):  # it is found out when it is needed
                other.sendall(REQUEST.pack(Ask.FORGET, round_number, 0, self._steps))
        while True:
            while not select.select([donor], [], [], _LOOK_S)[0]:
                self._check()
            head, ahead = receive_head(donor)
            match head:
                case NothingYet():
                    self._near(round_number)
                case Entered():
                    return head, []
                case Stepped():
                    return head, _receive_checked(donor, head)
                case Result():
                    values = _receive(donor, head)
                    if self._pursuit.is_near(ahead):
                        self._near(round_number)
                    return head, values
                case _:
                    raise BrokenLessonError(f"{type(head).__name__} instead of a result")

    def _near(self, round_number: int) -> None:
        if not self._is_near and (self._pursuit.is_hopeless or self._may_come()):
            self._is_near = True
            self._on_near(round_number)


def _receive_checked(donor: Connection, head: Stepped) -> Values:
    values = _receive(donor, head)
    if digest_of_chunk([memory_of(each) for each in values]) != head.digest:
        raise BrokenLessonError(f"a step before round {head.round} came damaged")
    return values


def _receive(donor: Connection, head: Result | Stepped) -> Values:
    values = []
    for name, shape in head.tensors:
        dtype = getattr(torch, name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise BrokenLessonError(f"a tensor of {name}")
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        receive_into(donor, memory_of(tensor))
        values.append(tensor)
    return values
