"""Proves that all ranks end with the same bits, by executing their schedules on symbolic terms."""

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
    """Proves that an all_reduce or an all_gather leaves the same bits in OUTPUT on all ranks.

    Sums and PACK round, so equal sums need not have equal bits. `verify` proves that the order of events does not
    matter, so checking one order is sufficient: each rank executes its steps in order, and links buffer any number of
    messages.

    Args:
        schedules: the schedules of all ranks, in order; `verify` must have accepted them.

    Raises:
        ValueError: the operation is neither an all_reduce nor an all_gather.
        ScheduleError: two ranks may end with different bits; the message identifies the ranks and the block.
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
    """Executes the schedules of all ranks on terms, which describe how a block's values are computed.

    A term is a rank's own block, a sum of two terms, a packed or unpacked term, or a mean. Equal terms have equal bits.
    A table assigns a number to each term, given the numbers of the term's parts.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self._schedules = schedules
        self._numbers: dict[tuple[object, ...], Term] = {}
        self._links: dict[tuple[int, int], deque[list[Term]]] = defaultdict(deque)
        self._moved = 0  # the number of messages sent or received so far
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
        """Runs the ranks in turn, each until it must wait for a message.

        Raises:
            ScheduleError: all ranks are waiting for messages.
        """
        running = deque((rank, self._steps(rank)) for rank in range(len(self._schedules)))
        idle = 0
        while running:
            rank, steps = running.popleft()
            moved_before = self._moved
            number = next(steps, None)
            if number is not None:
                running.append((rank, steps))
            idle = 0 if number is None or self._moved > moved_before else idle + 1
            if number is not None and idle > len(running):
                raise step_error(self._schedules[rank], number, "waits forever for its message")

    def output(self, rank: int) -> list[Term]:
        """Returns the terms in a rank's OUTPUT in block order."""
        held = self._memories[rank]
        return [held[place] for place in sorted(held) if place[0] is Buffer.OUTPUT]

    def _steps(self, rank: int) -> Iterator[int]:
        """Executes the steps of a rank; yields the index of each step that must wait for its message."""
        schedule, held = self._schedules[rank], self._memories[rank]
        for number, (kind, peer, dst, src, final) in enumerate(schedule.steps):
            if kind is StepKind.SEND:
                self._links[rank, peer].append([held[place] for place in _blocks_of(src)])
                self._moved += 1
                continue
            incoming = self._links[peer, rank]
            while kind in (StepKind.RECV, StepKind.REDUCE) and not incoming:
                yield number
            received: list[Term] = []
            if kind in (StepKind.RECV, StepKind.REDUCE):
                received = incoming.popleft()
                self._moved += 1
            local = [held[place] for place in _blocks_of(src)]
            for index, place in enumerate(_blocks_of(dst)):
                match kind:
                    case StepKind.RECV:
                        held[place] = received[index]
                    case StepKind.REDUCE:
                        held[place] = self._sum(local[index], received[index], final)
                    case StepKind.ADD:
                        held[place] = self._sum(held[place], self._term("unpacked", local[index]), final)
                    case StepKind.PACK:
                        held[place] = self._term("packed", local[index])
                    case StepKind.UNPACK:
                        held[place] = self._term("unpacked", local[index])
                    case _:
                        held[place] = local[index]

    def _sum(self, one: Term, other: Term, final: bool) -> Term:
        return self._term("mean" if final else "sum", *sorted((one, other)))  # a + b and b + a have the same bits

    def _term(self, *parts: object) -> Term:
        return self._numbers.setdefault(parts, len(self._numbers))


def _blocks_of(blocks: BufferSlice | None) -> list[_Place]:
    return [] if blocks is None else [(blocks.buffer, blocks.first + index) for index in range(blocks.length)]
