"""A group's collectives as schedules, each by the algorithm that is the fastest for it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

from paceline import _core
from paceline.engine.algorithms import ALGORITHM_NAMES, OPERATION_NAMES
from paceline.engine.channel import Call, Channel
from paceline.engine.codes import ITEM_SIZES, Operation
from paceline.schedule.cost import Choice, CostModel, choose
from paceline.schedule.registry import build, offers
from paceline.schedule.steps import Operation as Name
from paceline.schedule.steps import Schedule, Slice

# Every rank knows all sizes but those of an all_to_all, which differ from rank to rank.
_ANY_SIZE = 1 << 20
_WHOLE = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.GATHER, Operation.SCATTER)


class ScheduledChannel(Channel):
    """Runs the calls of one group by schedules over its links.

    Args:
        links: the group's lanes.
        rank: this rank's in the group.
        hosts: group ranks by host.
        model: what messages cost; the same on all ranks, since all must choose alike.
        forced: the algorithm for every operation that it has.
    """

    def __init__(
        self,
        links: _core.ScheduleGroup,
        rank: int,
        hosts: Sequence[Sequence[int]],
        model: CostModel,
        forced: str | None,
    ) -> None:
        self._links = links
        self._rank = rank
        self._hosts = [list(ranks) for ranks in hosts]
        self._size = sum(map(len, hosts))
        self._model = model
        self._forced = forced
        # Bounded: programs use few sizes again and again.
        self._algorithm = functools.lru_cache(1024)(lambda name, nbytes: self.choose(name, nbytes).algorithm)
        self._schedule = functools.lru_cache(256)(self._build)

    def choose(self, operation: Name, nbytes: int) -> Choice:
        """The algorithm for a call, and what all candidates would take."""
        forced = self._forced if self._forced in offers(operation) else None
        return choose(self._model, operation, nbytes, self._size, self._hosts, forced)

    def run(self, call: Call) -> _core.Outcome | None:
        """Runs a call to its end; None when it went well."""
        return self._links.run(self._schedule_for(call), call)

    def submit(self, call: Call) -> _core.Work:
        """Queues a call behind those made before."""
        return self._links.submit(self._schedule_for(call), call)

    def close(self) -> None:
        """Does nothing: the group that owns the links closes them."""

    def _schedule_for(self, call: Call) -> _core.Schedule:
        name = OPERATION_NAMES[call.operation]
        return self._schedule(self._algorithm(name, self._nbytes(call)), name, call.root)

    def _nbytes(self, call: Call) -> int:
        """The longest buffer of a rank, by which an algorithm is chosen."""
        if call.operation == Operation.ALL_TO_ALL:
            return _ANY_SIZE
        nbytes = call.count * ITEM_SIZES[call.dtype]
        return nbytes * self._size if call.operation in _WHOLE else nbytes

    def _build(self, algorithm: str, name: Name, root: int) -> _core.Schedule:
        schedule = build(algorithm, name, self._rank, self._size, root, self._hosts)
        code = 1 + ALGORITHM_NAMES.index(algorithm)
        return _core.Schedule.make(code, schedule.blocks, self._rank, self._size, _flatten(schedule))


def _flatten(schedule: Schedule) -> bytes:
    """Nine numbers a step, as native/executor/schedule.hpp takes them."""
    flat = array("i")
    for step in schedule.steps:
        flat.extend((step.kind, step.final, step.peer, *_numbers(step.dst), *_numbers(step.src)))
    return flat.tobytes()


def _numbers(slice_: Slice | None) -> tuple[int, int, int]:
    return (slice_.buffer, slice_.first, slice_.length) if slice_ is not None else (1, 0, 0)
