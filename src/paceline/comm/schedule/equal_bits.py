"""Proves that ranks which should have equal results have equal bits, although sums and PACK round.

What a place holds is spelt as a term of how it came about: a rank's own block, a sum of two terms, a term packed or
unpacked, a mean. Equal terms have equal bits. `symbolic.verify` proves that the order of events decides nothing, so one
order is enough: each rank takes its steps in their order, and links hold whatever is under way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from paceline.comm.schedule.steps import Buffer, BufferSlice, Operation, Schedule, StepKind
from paceline.comm.schedule.verify import ScheduleError, initial_buffers, step_error

Term: TypeAlias = int
_Place: TypeAlias = tuple[Buffer, int]

_OF_ALL = frozenset((Operation.ALL_REDUCE, Operation.ALL_GATHER))


def require_equal_bits(schedules: Sequence[Schedule]) -> None:
    """Requires that all ranks end an all_reduce or an all_gather with the same bits in OUTPUT.

    The schedules, those of all ranks in their order, are known to be right otherwise.

    Raises:
        ValueError: the operation gives each rank a result of its own.
        ScheduleError: two ranks may end with different bits; it names them and the block.
    """
    first = schedules[0]
    if first.operation not in _OF_ALL:
        raise ValueError(f"{first.operation} does not give all ranks the same result; all_reduce and all_gather do")
    run = TermExecution(schedules)
    run.to_the_end()
    for index, term in enumerate(run.output(0)):
        for rank in range(1, len(schedules)):
            if run.output(rank)[index] != term:
                where = f"{first.algorithm} {first.operation} of {len(schedules)}"
                raise ScheduleError(f"{where}: OUTPUT[{index}] of ranks 0 and {rank} may differ in their bits")


class TermExecution:
    """One run of the schedules of a world on terms.

    Two terms that are spelt alike are one number: each is entered into a table, by the numbers of its parts.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._schedules = schedules
        self._numbers: dict[tuple[object, ...], Term] = {}
        self._links: dict[tuple[int, int], deque[list[Term]]] = defaultdict(deque)
        self._moved = 0  # how often a message was sent or received so far
        self._memories = [self._initial(schedule) for schedule in schedules]

    def _initial(self, schedule: Schedule) -> dict[_Place, Term]:
        named = zip(Buffer, initial_buffers(schedule), strict=False)
        return {
            (buffer, index): self._term("own", value)
            for buffer, values in named
            for index, value in enumerate(values)
            if value is not None
        }

    def to_the_end(self) -> None:
        """Lets the ranks take turns, each going on until it waits for a message.

        Raises:
            ScheduleError: all wait.
        """
        going = deque((rank, self._steps(rank)) for rank in range(len(self._schedules)))
        idle = 0
        while going:
            rank, steps = going.popleft()
            moved_before = self._moved
            number = next(steps, None)
            if number is not None:
                going.append((rank, steps))
            idle = 0 if number is None or self._moved > moved_before else idle + 1
            if number is not None and idle > len(going):
                raise step_error(self._schedules[rank], number, "waits for ever for its message")

    def output(self, rank: int) -> list[Term]:
        """Returns the terms in a rank's OUTPUT, in the order of the blocks."""
        held = self._memories[rank]
        return [held[place] for place in sorted(held) if place[0] is Buffer.OUTPUT]

    def _steps(self, rank: int) -> Iterator[int]:
        """Takes the steps of a rank; yields the number of one that must wait for its message."""
        schedule, held = self._schedules[rank], self._memories[rank]
        for number, (kind, peer, dst, src, final) in enumerate(schedule.steps):
            if kind is StepKind.SEND:
                self._links[rank, peer].append([held[place] for place in _places(src)])
                self._moved += 1
                continue
            incoming = self._links[peer, rank]
            while kind in (StepKind.RECV, StepKind.REDUCE) and not incoming:
                yield number
            received: list[Term] = []
            if kind in (StepKind.RECV, StepKind.REDUCE):
                received = incoming.popleft()
                self._moved += 1
            local = [held[place] for place in _places(src)]
            for at, place in enumerate(_places(dst)):
                match kind:
                    case StepKind.RECV:
                        held[place] = received[at]
                    case StepKind.REDUCE:
                        held[place] = self._sum(local[at], received[at], final)
                    case StepKind.ADD:
                        held[place] = self._sum(held[place], self._term("unpacked", local[at]), final)
                    case StepKind.PACK:
                        held[place] = self._term("packed", local[at])
                    case StepKind.UNPACK:
                        held[place] = self._term("unpacked", local[at])
                    case _:
                        held[place] = local[at]

    def _sum(self, one: Term, other: Term, final: bool) -> Term:
        return self._term("mean" if final else "sum", *sorted((one, other)))  # a + b and b + a have the same bits

    def _term(self, *parts: object) -> Term:
        return self._numbers.setdefault(parts, len(self._numbers))


def _places(blocks: BufferSlice | None) -> list[_Place]:
    return [] if blocks is None else [(blocks.buffer, blocks.first + at) for at in range(blocks.length)]
