"""Simulates DiLoCo training in virtual time: the state machines are real, but the steps and messages are simulated."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from paceline.train.diloco.exchange_scheduler import (
    FINISHED,
    ArrivalTracker,
    ExchangeInterval,
    ExchangeScheduler,
    Participants,
    UseResult,
)


@dataclass
class Rank:
    """A rank: its training run, and the messages that its thread has received."""

    scheduler: ExchangeScheduler
    step_s: list[float]  # duration of each step in its loop
    decided: int = 0
    outcomes: dict[int, Participants] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)
    offered: set[int] = field(default_factory=set)
    awaits: int | None = None
    waited_s: dict[int, float] = field(default_factory=dict)  # by exchange
    since_s: float = 0.0
    loops: int = 0
    has_finished: bool = False
    has_left: bool = False


class Simulation:
    """Simulates training until all ranks have left; `ranks`, `held` and `done_s` describe what happened.

    Args:
        rhythm: The schedule of the exchanges of fragments.
        step_s: The duration of each rank's steps.
        grace_s: The time to wait for late ranks.
        latency_s: A function that returns the latency of the next message.
        exchange_s: The duration of an exchange.
    """

    def __init__(
        self,
        rhythm: ExchangeInterval,
        step_s: list[list[float]],
        grace_s: float,
        latency_s: Callable[[], float],
        exchange_s: float,
    ) -> None:
        self.ranks = [Rank(ExchangeScheduler(rhythm), each) for each in step_s]
        self.roll = ArrivalTracker(len(step_s), grace_s)
        self.held: list[Participants] = []
        self.first_s: dict[int, float] = {}  # when rank 0 was notified of the first arrival at each exchange
        self.decided_s: list[float] = []
        self.free_s = 0.0  # when rank 0's thread completed each exchange
        self.now_s = 0.0
        self._latency_s, self._exchange_s = latency_s, exchange_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def run(self) -> None:
        """Runs all events."""
        for number, rank in enumerate(self.ranks):
            self._begin_step(number, rank)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def _begin_step(self, number: int, rank: Rank) -> None:
        if rank.loops == len(rank.step_s):
            rank.has_finished = True
            self._say(number, FINISHED)
            self._use_rest(rank)
            return
        self._at(self.now_s + rank.step_s[rank.loops], lambda: self._end_step(number, rank))

    def _end_step(self, number: int, rank: Rank) -> None:
        rank.loops += 1
        rank.scheduler.catch_up(rank.decided)
        rank.scheduler.step()
        self._proceed(number, rank)

    def _proceed(self, number: int, rank: Rank) -> None:
        while (action := rank.scheduler.due()) is not None:
            if isinstance(action, UseResult):
                if action.exchange not in rank.outcomes:
                    rank.awaits, rank.since_s = action.exchange, self.now_s
                    return
                rank.used.append(action.exchange)
            elif action.exchange >= rank.decided:
                rank.offered.add(action.exchange)
                self._say(number, action.exchange)
            rank.scheduler.complete(action)
        self._begin_step(number, rank)

    def _say(self, number: int, what: int) -> None:
        delay_s = 0.0 if number == 0 else self._latency_s()
        self._at(self.now_s + delay_s, lambda: self._hear(number, what))

    def _hear(self, number: int, what: int) -> None:
        if what != FINISHED:
            self.first_s.setdefault(what, self.now_s)
        self.roll.arrived(number, what, self.now_s)
        self._call()

    def _call(self) -> None:
        if self.now_s < self.free_s:
            self._at(self.free_s, self._call)
            return
        verdict = self.roll.decide(self.now_s)
        if verdict is None:
            due_s = self.roll.due_s()
            if due_s is not None and due_s > self.now_s:
                self._at(due_s, self._call)
            return
        if verdict.is_final:
            for rank in self.ranks:
                rank.has_left = True
            return
        exchange = len(self.held)
        self.held.append(verdict)
        self.decided_s.append(self.now_s)
        received_s = [
            self.now_s if number == 0 else self.now_s + self._latency_s() for number in range(len(self.ranks))
        ]
        self.free_s = max(received_s) + self._exchange_s
        for number, rank in enumerate(self.ranks):
            self._at(received_s[number], lambda rank=rank: self._decide(rank, exchange))
            self._at(self.free_s, lambda number=number, rank=rank: self._give(number, rank, exchange))
        self._at(self.free_s, self._call)

    def _decide(self, rank: Rank, exchange: int) -> None:
        rank.decided = exchange + 1

    def _give(self, number: int, rank: Rank, exchange: int) -> None:
        rank.outcomes[exchange] = self.held[exchange]
        if rank.has_finished:
            self._use_rest(rank)
        elif rank.awaits == exchange:
            rank.waited_s[exchange] = self.now_s - rank.since_s
            rank.awaits = None
            self._proceed(number, rank)

    def _use_rest(self, rank: Rank) -> None:
        while len(rank.used) in rank.outcomes:
            rank.used.append(len(rank.used))


def drawn(seed: int) -> Simulation:
    """Returns a simulation whose number of ranks, speeds, schedule and delays depend on the seed."""
    draw = random.Random(seed)
    every = draw.randint(1, 12)
    rhythm = ExchangeInterval(every, draw.randint(1, every), draw.randrange(every))
    ranks = draw.randint(1, 5)
    pace = [draw.choice([1.0, 1.0, 1.1, 2.0, 7.0]) for _ in range(ranks)]
    loops = [draw.choice([40, 40, 35, 0]) for _ in range(ranks)]
    step_s = [
        [each * draw.uniform(0.9, 1.1) + (50.0 if draw.random() < 0.02 else 0.0) for _ in range(steps)]
        for each, steps in zip(pace, loops, strict=True)
    ]
    longest_s = draw.choice([0.0, 0.1, 3.0])
    grace_s = draw.choice([0.01, 1.0, 5.0, 1e9])
    return Simulation(rhythm, step_s, grace_s, lambda: draw.uniform(0, longest_s), draw.choice([0.0, 0.5, 9.0]))
