"""Runs a group's collectives as schedules, each by the algorithm that the cost model expects to be the fastest."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from paceline import _core
from paceline.engine.algorithms import ALL_TO_ALL_NBYTES
from paceline.engine.channel import Call, Channel
from paceline.engine.codes import ITEM_SIZES, WIRE_CODES, WIRES
from paceline.engine.native.foresight import Surprise, words_of
from paceline.schedule.cost import Choice, CostModel, choose
from paceline.schedule.flat import flatten
from paceline.schedule.network import Network
from paceline.schedule.registry import SYNTHESISED, build, number_of, offers
from paceline.schedule.steps import Operation
from paceline.schedule.synthesis.choosing import can_synthesise, choose_all_reduce, synthesise

_WHOLE = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.GATHER, Operation.SCATTER)


class ScheduledChannel(Channel):
    """Runs the calls of one group by schedules over its links.

    Args:
        links: the group's links, over which the native executor runs schedules.
        rank: the group rank of this process.
        hosts: the group ranks of each host.
        model: what messages cost; it is the same on all ranks, since all must choose the same algorithm.
        forced: the algorithm to use for every operation that it offers; None leaves the choice to `model`.
        network: the group's network if its links differ; all-reduces then choose by simulation, also of schedules that
            are made for this network.
    """

    def __init__(
        self,
        links: _core.ScheduleGroup,
        rank: int,
        hosts: Sequence[Sequence[int]],
        model: CostModel,
        forced: str | None,
        network: Network | None = None,
    ) -> None:
        self._links = links
        self._rank = rank
        self._hosts = [list(ranks) for ranks in hosts]
        self._size = sum(map(len, hosts))
        self._model = model
        self._forced = forced
        # The caches are bounded, which suffices because programs use a few sizes again and again.
        self._uneven = network if network is not None and can_synthesise(network) else None
        self._synthesised = synthesise(self._uneven) if self._uneven is not None else []
        self._choice = functools.lru_cache(1024)(self.choose)
        self._schedule = functools.lru_cache(256)(self._build)

    def choose(self, operation: Operation, nbytes: int) -> Choice:
        """Returns the algorithm for a call of `nbytes` bytes, and the time that each candidate is expected to take."""
        forced = self._forced if self._forced in offers(operation) else None
        if self._uneven is not None and operation is Operation.ALL_REDUCE:
            return choose_all_reduce(self._uneven, self._synthesised, nbytes, forced)
        return choose(self._model, operation, nbytes, self._size, self._hosts, forced)

    @property
    def quantises(self) -> bool:
        """Returns True: what a call has on the wire decides its schedule."""
        return True

    def run(self, call: Call) -> _core.Outcome | None:
        """Runs a call to its end; returns None if it succeeded."""
        self._say_surprise()
        return self._links.run(*self._planned(call))

    def submit(self, call: Call) -> _core.Work:
        """Queues a call behind those made before, and returns at once."""
        self._say_surprise()
        return self._links.submit(*self._planned(call))

    def prepare(self, call: Call) -> _core.PreparedCall:
        """Returns the call with its schedule."""
        self._say_surprise()
        return self._links.prepare(*self._planned(call))

    def record_as(self, group: int) -> None:
        """Records the calls of the links."""
        self._links.record_as(group)

    def abort(self) -> None:
        """Ends the calls of all ranks, and their messages, which use the same links."""
        self._links.abort()

    def failure(self) -> int:
        """Returns the code of the links' failure."""
        return self._links.failure()

    def close(self) -> None:
        """Says what was far from its prediction, if nothing has yet; the group that owns the links closes them."""
        self._say_surprise()

    def _say_surprise(self) -> None:
        """Says once, on rank 0, which calls took much more or less time than was predicted."""
        if self._rank == 0 and (found := self._links.surprise()) is not None:
            logging.getLogger(__name__).info(words_of(Surprise(*found)))

    def _planned(self, call: Call) -> tuple[_core.Schedule, Call, int]:
        """Returns the call with its schedule and the nanoseconds that it should take, 0 if nothing predicts them."""
        if call.wire:
            return self._schedule(WIRES[call.wire - 1], call.operation, call.root), call, 0
        choice = self._choice(call.operation, self._nbytes(call))
        predicted_ns = 0 if call.operation == Operation.BARRIER else round(1e9 * choice.seconds)
        return self._schedule(choice.algorithm, call.operation, call.root), call, predicted_ns

    def _nbytes(self, call: Call) -> int:
        """Returns the size in bytes of a rank's longest buffer, by which the algorithm is chosen."""
        if call.operation == Operation.ALL_TO_ALL:
            return ALL_TO_ALL_NBYTES
        nbytes = call.count * ITEM_SIZES[call.dtype]
        return nbytes * self._size if call.operation in _WHOLE else nbytes

    def _build(self, algorithm: str, operation: Operation, root: int) -> _core.Schedule:
        if algorithm == SYNTHESISED:
            schedule = self._synthesised[self._rank]
        else:
            schedule = build(algorithm, operation, self._rank, self._size, root, self._hosts)
        wire = WIRE_CODES.get(algorithm, 0)
        return _core.Schedule.make(
            number_of(algorithm), schedule.blocks, self._rank, self._size, flatten(schedule), wire
        )
