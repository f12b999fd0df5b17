"""The symbolic executor: proves that the schedules of a world do what their operation promises.

It runs them all on values that say whose contributions they hold (`meaning.py`), over links that hold nothing, block by
block, each as soon as `steps.py` allows. One run proves every run: what a step waits for follows from the schedules,
not from the order of events, so if one order ends well every order does, and if one order is stuck every order is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from paceline.schedule.steps import Buffer, Kind, Operation, Schedule
from paceline.schedule.verify.barriers import verify_barrier
from paceline.schedule.verify.matching import Move, ScheduleError, fault, moves_by_link
from paceline.schedule.verify.meaning import CUT_LIKE_THE_TENSOR, REDUCING, Value, fits, required_output
from paceline.schedule.verify.memory import Memory
from paceline.wording import and_more

__all__ = ["ScheduleError", "verify"]


def verify(schedules: Sequence[Schedule]) -> None:
    """Proves the schedules of all ranks, in rank order.

    At the end every block holds each contribution once and no other; INPUT is never written; nothing is read before it
    is written; blocks are only kept where they fit; `final` is set exactly where the last contribution comes in;
    every SEND meets a step that takes as many blocks; and nothing waits for ever, even if links hold nothing.

    Raises:
        ScheduleError: at the first fault; it names the rank and the step.
    """
    first = schedules[0]
    for rank, schedule in enumerate(schedules):
        if (rank, len(schedules)) != (schedule.rank, schedule.world_size):
            found = f"rank {schedule.rank} of {schedule.world_size}"
            raise ScheduleError(f"schedule {rank} of {len(schedules)} is that of {found}: give all in rank order")
        if (schedule.operation, schedule.root, schedule.blocks) != (first.operation, first.root, first.blocks):
            raise ScheduleError(f"rank {rank} and rank 0 differ in operation, root or number of blocks")
    if first.operation is Operation.BARRIER:
        verify_barrier(schedules)
    else:
        world = _World(schedules)
        world.run()
        world.check_output()


_Wait: TypeAlias = tuple[int, int, int]
"""A place, a rank and a step's number; the step cannot go on before an earlier one has read or written the place."""


class _World:
    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules
        self.memory = Memory(schedules)
        self.everyone = (1 << len(schedules)) - 1
        self.ready: deque[Iterator[_Wait]] = deque()
        self.waiting: dict[int, list[tuple[_Wait, Iterator[_Wait]]]] = {}

    def run(self) -> None:
        """Lets every link go on until it must wait for a place; a change of the place wakes it."""
        self.ready.extend(self.link(moves) for moves in moves_by_link(self.schedules))
        while self.ready:
            link = self.ready.popleft()
            wait = next(link, None)
            if wait is not None:
                self.waiting.setdefault(wait[0], []).append((wait, link))
        if self.waiting:
            waits = [wait for sleepers in self.waiting.values() for wait, _ in sleepers]
            place, rank, number = min(waits, key=lambda wait: (wait[2], wait[1]))
            what = f"waits for ever for an earlier step on {self.memory.name(place, rank)}"
            raise fault(self.schedules[rank], number, what)

    def link(self, moves: list[Move]) -> Iterator[_Wait]:
        """Does the moves of one link, block after block; yields at each place that is not ready."""
        # Nearly all of the time is spent here, so the loop works on local names.
        memory, waiting, ready, everyone = self.memory, self.waiting, self.ready, self.everyone
        values, written, accessed, accesses = memory.values, memory.written, memory.accessed, memory.accesses
        operation = self.schedules[0].operation
        fits_by_index = operation in CUT_LIKE_THE_TENSOR
        reduces = operation in REDUCING
        for source, source_step, target, target_step in moves:
            reads = accesses[source][source_step][0]
            own_reads, writes = accesses[target][target_step]
            kind, _, dst_slice, src_slice, final = self.schedules[target].steps[target_step]
            adding = kind is Kind.REDUCE or kind is Kind.ADD
            apart = kind is Kind.REDUCE and src_slice != dst_slice
            into_wire = dst_slice is not None and dst_slice.buffer is Buffer.WIRE
            start = memory.start(target, dst_slice.buffer) if dst_slice else 0
            for (src, writes_before), (own, own_before), (dst, accesses_before) in zip(
                reads, own_reads if apart else writes, writes, strict=True
            ):
                while written[src] != writes_before:
                    yield src, source, source_step
                while apart and written[own] != own_before:
                    yield own, target, target_step
                while accessed[dst] != accesses_before:
                    yield dst, target, target_step
                value = values[src]
                if value is None:
                    raise fault(self.schedules[source], source_step, f"{memory.name(src, source)} is undefined")
                if adding:
                    mine = values[own]
                    if mine is None or mine[0] != value[0] or mine[1] & value[1] or not reduces:
                        raise self.cannot_add(mine, value, target, target_step)
                    contributors = mine[1] | value[1]
                    if (contributors == everyone) != final:
                        raise self.is_not_final(contributors, target, target_step)
                    value = (value[0], contributors)
                if into_wire:
                    if (values[dst] or value)[0] != value[0]:
                        what = f"block {value[0]} is kept where another block was, which may have another size"
                        raise fault(self.schedules[target], target_step, what)
                elif value[0] != dst - start if fits_by_index else not fits(operation, target, dst - start, value):
                    what = f"block {value[0]} is kept in {memory.name(dst, target)}, which may have another size"
                    raise fault(self.schedules[target], target_step, what)
                values[dst] = value
                written[dst] += 1
                for place in (src, dst, own) if apart else (src, dst):
                    accessed[place] += 1
                    if place in waiting:
                        ready.extend([link for _, link in waiting.pop(place)])

    def cannot_add(self, own: Value | None, received: Value, rank: int, number: int) -> ScheduleError:
        """Returns why two values have no sum: they must be of one block, and have no contributor in common."""
        schedule = self.schedules[rank]
        if schedule.operation not in REDUCING:
            return fault(schedule, number, f"{schedule.operation} reduces nothing")
        if own is None:
            return fault(schedule, number, "its src is undefined")
        if own[0] != received[0]:
            return fault(schedule, number, f"adds block {received[0]} to block {own[0]}")
        twice = own[1] & received[1]
        return fault(schedule, number, f"counts the contributions of ranks {_ranks(twice)} twice")

    def is_not_final(self, contributors: int, rank: int, number: int) -> ScheduleError:
        """Returns how a sum of `contributors` differs from what its step is marked as."""
        schedule = self.schedules[rank]
        if missing := self.everyone & ~contributors:
            what = f"is marked final, but the contributions of ranks {_ranks(missing)} are missing"
            return fault(schedule, number, what)
        return fault(schedule, number, "has all contributions, but is not marked final")

    def check_output(self) -> None:
        """Compares each rank's OUTPUT with what the operation promises."""
        for rank, schedule in enumerate(self.schedules):
            places = self.memory.buffer(rank, Buffer.OUTPUT)
            for index, (place, promised) in enumerate(zip(places, required_output(schedule), strict=True)):
                if self.memory.values[place] != promised:
                    where = f"{schedule.algorithm} {schedule.operation} of {schedule.world_size}, rank {rank}"
                    found, wanted = _spell(self.memory.values[place]), _spell(promised)
                    raise ScheduleError(f"{where}, at the end: OUTPUT[{index}] holds {found} instead of {wanted}")


def _spell(value: Value | None) -> str:
    return "nothing" if value is None else f"block {value[0]} of ranks {_ranks(value[1])}"


def _ranks(mask: int) -> str:
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    return and_more(ranks, 8)
