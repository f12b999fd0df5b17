"""How ranks learn who takes part in an exchange: by waiting for all of them, or by a roll that one of them calls."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

import torch

from paceline.errors import CollectiveMismatchError
from paceline.group.process_group import ProcessGroup
from paceline.group.work import Work
from paceline.parallel.local.desk import Desk
from paceline.parallel.local.roll import FINISHED, Roll, Verdict, who_is_there

_ARRIVALS, _VERDICTS = 1, 2  # tags
_CALLER = 0  # the rank that calls the roll
_EVER = timedelta.max  # a round takes as long as it takes, and a rank that dies ends the wait


class Attendance(Protocol):
    """Says who takes part in each exchange."""

    def came(self, number: int) -> None:
        """Tells the others that this rank has come to an exchange, or is FINISHED; the training calls this."""
        ...

    def is_sure(self, number: int) -> bool:
        """Returns whether this rank takes part in an exchange whatever the verdict, which the thread asks for next."""
        ...

    def verdict(self, number: int) -> Verdict:
        """Waits for the verdict about an exchange; the thread calls this."""
        ...


class Everyone:
    """Waits for all ranks that have not finished.

    Those that come need not wait for the verdict before they send what they have: it comes while they exchange that, in
    `group`, in which there are no other calls.
    """

    def __init__(self, group: ProcessGroup, desk: Desk) -> None:
        self._group, self._desk = group, desk
        self._mine = FINISHED  # what this rank tells the others

    def came(self, number: int) -> None:
        """Does nothing: the ranks ask each other when they are there."""

    def is_sure(self, number: int) -> bool:
        """Waits until this rank has come, and returns True; or until it has finished, and returns False."""
        desk = self._desk
        with desk.changed:
            while (mine := desk.has_come_to(number)) is None:
                desk.pause(None)
        self._mine = FINISHED if mine == FINISHED else number
        return mine != FINISHED

    def verdict(self, number: int) -> Verdict:
        """Returns who takes part, once each rank has come or finished.

        Raises:
            CollectiveMismatchError: the ranks have come to different exchanges.
            CollectiveTimeoutError: a rank did not come within the group's time-out.
        """
        numbers = torch.zeros(self._group.size(), dtype=torch.int64)
        self._group.all_gather(list(numbers.split(1)), torch.tensor([self._mine]))
        try:
            return who_is_there(numbers.tolist())
        except ValueError as error:
            raise CollectiveMismatchError(
                f"rank {self._group.me.rank}: the ranks hold different exchanges; {error}. Make DiLoCo with the same "
                "arguments, load the same state on every rank, and call step() after each inner step"
            ) from None


class RollCall:
    """Rank 0 calls the roll, and does not wait for ranks that come later than the grace window allows.

    The others tell it when they have come to an exchange, or finished, and wait for its verdicts on their threads.
    """

    def __init__(self, group: ProcessGroup, grace_s: float, desk: Desk, number: int) -> None:
        self._group, self._desk = group, desk
        self._sent: list[Work] = []
        self._roll = Roll(group.size(), grace_s, number)
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

    def verdict(self, number: int) -> Verdict:
        """Returns who takes part: all that came within the grace window of the first one.

        Raises:
            PeerLostError: a rank died.
        """
        if not self._calls:
            told = torch.zeros(self._group.size() + 1, dtype=torch.int64)
            self._group.recv(told, _CALLER, _VERDICTS, async_op=False, timeout=_EVER)
            is_final, *takes_part = [bool(each) for each in told.tolist()]
            return Verdict(tuple(takes_part), is_final)
        verdict = self._call()
        told = torch.tensor([verdict.is_final, *verdict.takes_part], dtype=torch.int64)
        for rank in range(1, self._group.size()):
            self._send(told, rank, _VERDICTS)
        for work in self._sent:
            work.wait()
        self._sent = []
        return verdict

    def _call(self) -> Verdict:
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
        mine = self._desk.has_come_to(self._roll.number)
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
