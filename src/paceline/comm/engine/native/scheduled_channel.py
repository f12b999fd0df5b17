"""`ScheduledChannel`, which runs each collective as a schedule, with the algorithm predicted to be the fastest.

The core detects calls whose times differ greatly from the prediction (native/call/foresight.hpp); they are logged once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

from paceline import _core
from paceline.comm.engine.channel import CollectiveCall, EngineChannel
from paceline.comm.engine.codes import ITEM_SIZES, WIRE_CODES
from paceline.comm.engine.network_settings import ALL_TO_ALL_NBYTES
from paceline.comm.record.layout import DTYPES, OPERATIONS
from paceline.comm.schedule.cost import AlgorithmChoice, choose, format_seconds
from paceline.comm.schedule.cost_model import CostModel
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.quantised import WIRES
from paceline.comm.schedule.registry import SYNTHESISED, algorithms_offering, build, name_of, number_of
from paceline.comm.schedule.steps import Operation, flatten
from paceline.comm.schedule.synthesis import can_synthesise, choose_all_reduce, synthesise


class PredictionMiss(NamedTuple):
    """Calls of one kind whose times were far from the prediction, as reported by `_core.ScheduleGroup.surprise`.

    Attributes:
        operation, algorithm, dtype: the codes that describe the kind of call.
        elements: the number of elements of each call.
        calls: the number of calls.
        least_ns: the time of the shortest call, in nanoseconds.
        predicted_ns: the predicted time of each call, in nanoseconds.
    """

    operation: int
    algorithm: int
    dtype: int
    elements: int
    calls: int
    least_ns: int
    predicted_ns: int


def describe_miss(found: PredictionMiss) -> str:
    """Returns the log message about mispredicted calls."""
    least, predicted = format_seconds(found.least_ns / 1e9), format_seconds(found.predicted_ns / 1e9)
    return (
        f"{OPERATIONS[found.operation]} of {found.elements:,} {DTYPES[found.dtype]} by {name_of(found.algorithm)} took "
        f"{least} at least in {found.calls} calls, but was predicted to take {predicted}: another algorithm may be "
        "faster. PACELINE_COSTS and PACELINE_NETWORK say what messages cost, and PACELINE_ALGORITHM forces one"
    )


_WHOLE = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.GATHER, Operation.SCATTER)


class ScheduledChannel(EngineChannel):
    """Runs the calls of one group as schedules over the group's links.

    Args:
        links: the group's links; the native executor runs schedules over them.
        rank: the group rank of this process.
        hosts: the group ranks of each host.
        model: the link costs; they must be equal on all ranks, since all ranks must choose the same algorithm.
        forced: the algorithm to use for every operation that it implements; None leaves the choice to `model`.
        network: the group's network, if its links are unequal. The algorithm for an all-reduce is then chosen by
            simulation, and the candidates include schedules synthesized for this network.
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
        # Bounded caches are sufficient, because programs repeat a small number of sizes.
        self._uneven = network if network is not None and can_synthesise(network) else None
        self._synthesised = synthesise(self._uneven) if self._uneven is not None else []
        self._choice = functools.lru_cache(1024)(self.choose)
        self._schedule = functools.lru_cache(256)(self._build)

    def choose(self, operation: Operation, nbytes: int) -> AlgorithmChoice:
        """Returns the algorithm for a call on `nbytes` bytes, and the predicted time for each candidate."""
        forced = self._forced if self._forced in algorithms_offering(operation) else None
        if self._uneven is not None and operation is Operation.ALL_REDUCE:
            return choose_all_reduce(self._uneven, self._synthesised, nbytes, forced)
        return choose(self._model, operation, nbytes, self._size, self._hosts, forced)

    @property
    def quantises(self) -> bool:
        """Returns True: calls may specify a `wire`, which determines their schedule."""
        return True

    def run(self, call: CollectiveCall) -> _core.Outcome | None:
        """Runs a call to completion; returns None on success."""
        self._log_miss()
        return self._links.run(*self._planned(call))

    def submit(self, call: CollectiveCall) -> _core.Work:
        """Queues a call after the earlier ones and returns at once."""
        self._log_miss()
        return self._links.submit(*self._planned(call))

    def prepare(self, call: CollectiveCall) -> _core.PreparedCall:
        """Chooses the call's schedule and prepares the call for repetition."""
        self._log_miss()
        return self._links.prepare(*self._planned(call))

    def record_as(self, group: int) -> None:
        """Records later calls under the group's serial number."""
        self._links.record_as(group)

    def abort(self) -> None:
        """Aborts calls and messages on all ranks. (Messages use the same links as calls.)"""
        self._links.abort()

    def failure(self) -> int:
        """Returns the `OutcomeCode` for a failure of the links, or OK."""
        return self._links.failure()

    def close(self) -> None:
        """Logs mispredicted calls unless it has done so before. Does not close the links, which belong to the group."""
        self._log_miss()

    def _log_miss(self) -> None:
        """Logs once, on rank 0, calls that took much more or much less time than predicted."""
        if self._rank == 0 and (found := self._links.surprise()) is not None:
            logging.getLogger(__name__).info(describe_miss(PredictionMiss(*found)))

    def _planned(self, call: CollectiveCall) -> tuple[_core.Schedule, CollectiveCall, int]:
        """Returns the call's schedule, the call, and its predicted time in nanoseconds (0 if there is none)."""
        if call.wire:
            return self._schedule(WIRES[call.wire - 1], call.operation, call.root), call, 0
        choice = self._choice(call.operation, self._nbytes(call))
        predicted_ns = 0 if call.operation == Operation.BARRIER else round(1e9 * choice.seconds)
        return self._schedule(choice.algorithm, call.operation, call.root), call, predicted_ns

    def _nbytes(self, call: CollectiveCall) -> int:
        """Returns the size in bytes of a rank's longest buffer, which determines the algorithm."""
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
