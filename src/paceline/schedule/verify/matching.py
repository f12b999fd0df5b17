"""Matches each SEND with its RECV or REDUCE: on every link the k-th meets the k-th."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from paceline.schedule.steps import Buffer, Kind, Schedule, Slice, Step

# As in steps.py, the constructor of a named tuple would take twice as long, and there are many moves.
_new = tuple.__new__
_SEND, _RECV, _REDUCE, *_ = Kind
_LOCAL = frozenset(Kind) - {_SEND, _RECV, _REDUCE}


class ScheduleError(AssertionError):
    """The schedules of a world do not do what their operation promises; the message names rank, number and step."""


class Move(NamedTuple):
    """Blocks that go from a SEND to the step that receives them. A local step is a move from and to itself."""

    source: int
    source_step: int
    target: int
    target_step: int


def moves_by_link(schedules: Sequence[Schedule]) -> list[list[Move]]:
    """Returns the moves of every link in their order, and every local step as a list of its own.

    Raises:
        ScheduleError: a step names no other rank, or a SEND and its RECV or REDUCE do not match.
    """
    sends: dict[tuple[int, int], list[int]] = defaultdict(list)
    receives: dict[tuple[int, int], list[int]] = defaultdict(list)
    moves: list[list[Move]] = []
    for rank, schedule in enumerate(schedules):
        for number, (kind, peer, _, _, _) in enumerate(schedule.steps):
            if kind in _LOCAL:
                moves.append([Move(rank, number, rank, number)])
            elif peer == rank or not 0 <= peer < len(schedules):
                raise fault(schedule, number, f"there is no peer {peer}")
            elif kind is _SEND:
                sends[rank, peer].append(number)
            else:
                receives[peer, rank].append(number)
    for link in {**sends, **receives}:
        moves.append(_meet(schedules, *link, sends[link], receives[link]))
    return moves


def _meet(schedules: Sequence[Schedule], source: int, target: int, sends: list[int], receives: list[int]) -> list[Move]:
    met = []
    sent_steps, received_steps = schedules[source].steps, schedules[target].steps
    for sending, receiving in zip_longest(sends, receives):
        if receiving is None:
            raise fault(schedules[source], sending, f"rank {target} never receives it")
        if sending is None:
            raise fault(schedules[target], receiving, f"rank {source} never sends it")
        src, dst = sent_steps[sending][3], received_steps[receiving][2]
        if not (src and dst and src[2] == dst[2]):
            raise fault(schedules[target], receiving, f"rank {source} sends {src and src.length} blocks for it")
        if (src[0] is Buffer.WIRE) != (dst[0] is Buffer.WIRE):
            raise fault(schedules[target], receiving, f"rank {source} sends {_place(src)} for it")
        met.append(_new(Move, (source, sending, target, receiving)))
    return met


def fault(schedule: Schedule, number: int, what: str) -> ScheduleError:
    """Returns the error that says what is wrong with a step."""
    step = schedule.steps[number]
    where = f"{schedule.algorithm} {schedule.operation} of {schedule.world_size}, rank {schedule.rank}"
    return ScheduleError(f"{where}, step {number} ({spell(step)}): {what}")


def spell(step: Step) -> str:
    """Formats a step for a reader: `REDUCE OUTPUT[3:5] = OUTPUT[3:5] + from 2, final`."""
    match step.kind:
        case Kind.SEND:
            return f"SEND {_place(step.src)} to {step.peer}"
        case Kind.RECV:
            return f"RECV {_place(step.dst)} from {step.peer}"
        case Kind.REDUCE:
            final = ", final" if step.final else ""
            return f"REDUCE {_place(step.dst)} = {_place(step.src)} + from {step.peer}{final}"
        case Kind.COPY:
            return f"COPY {_place(step.dst)} = {_place(step.src)}"
        case Kind.PACK | Kind.UNPACK:
            return f"{step.kind.name} {_place(step.dst)} = {_place(step.src)}"
        case Kind.ADD:
            final = ", final" if step.final else ""
            return f"ADD {_place(step.dst)} = {_place(step.dst)} + {_place(step.src)}{final}"


def _place(blocks: Slice | None) -> str:
    if blocks is None:
        return "?"
    end = "" if blocks.length == 1 else f":{blocks.first + blocks.length}"
    return f"{blocks.buffer.name}[{blocks.first}{end}]"
