"""Lays the blocks of all ranks out as one row of places, and plans what every step must wait for there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from paceline.schedule.steps import Buffer, Kind, Schedule, Slice
from paceline.schedule.verify.matching import fault
from paceline.schedule.verify.meaning import Blocks, initial_buffers

_SEND, _RECV, _REDUCE, *_ = Kind
_INPUT, _WIRE = Buffer.INPUT, Buffer.WIRE
_CONVERTING = frozenset((Kind.PACK, Kind.UNPACK, Kind.ADD))

Accesses: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""The places that a step reads, and those that it writes, block by block, with what must have happened there before.

A read waits until the place has been written as often as the earlier steps of its rank write it; a write waits until
the place has been read and written as often as they do. A step that updates in place (src is dst) is one write.
"""


class Memory:
    """The `values` of all places, and how often each was `written` and `accessed` (read or written) so far."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        buffers = [
            buffer for schedule in schedules for buffer in (*initial_buffers(schedule), [None] * _wire_blocks(schedule))
        ]
        self._firsts = [0, *accumulate(len(buffer) for buffer in buffers)]
        self.values: Blocks = [value for buffer in buffers for value in buffer]
        self.written = [0] * len(self.values)
        self.accessed = [0] * len(self.values)
        self.accesses = _plan_accesses(self, schedules)

    def buffer(self, rank: int, buffer: Buffer) -> range:
        """Returns the places of a rank's buffer."""
        at = len(Buffer) * rank + buffer
        return range(self._firsts[at], self._firsts[at + 1])

    def start(self, rank: int, buffer: Buffer) -> int:
        """Returns the first place of a rank's buffer."""
        return self._firsts[len(Buffer) * rank + buffer]

    def name(self, place: int, rank: int) -> str:
        """Formats a place for a reader: `OUTPUT[3]`."""
        for buffer in Buffer:
            places = self.buffer(rank, buffer)
            if place in places:
                return f"{buffer.name}[{place - places.start}]"
        raise IndexError(place)


def _plan_accesses(memory: Memory, schedules: Sequence[Schedule]) -> list[list[Accesses]]:
    """Returns the accesses of each step of each rank, as they follow from the order of the rank's steps."""
    written = [0] * len(memory.values)
    accessed = [0] * len(memory.values)
    planned: list[list[Accesses]] = []
    nothing: list[tuple[int, int]] = []
    for schedule in schedules:
        of_rank: list[Accesses] = []
        places: dict[Slice, range] = {}
        for number, (kind, _, dst, src, final) in enumerate(schedule.steps):
            if final or not _is_simple(kind, dst, src):
                _check(schedule, number)
            reads = writes = nothing
            if src is not None and src is not dst and src != dst:
                found = places.get(src) or places.setdefault(src, _places(memory, schedule, number, src))
                reads = [(at, written[at]) for at in found]
                for at in found:
                    accessed[at] += 1
            if dst is not None:
                found = places.get(dst) or places.setdefault(dst, _places(memory, schedule, number, dst))
                writes = [(at, accessed[at]) for at in found]
                for at in found:
                    accessed[at] += 1
                    written[at] += 1
            of_rank.append((reads, writes))
        planned.append(of_rank)
    return planned


def _places(memory: Memory, schedule: Schedule, number: int, blocks: Slice) -> range:
    buffer = memory.buffer(schedule.rank, blocks.buffer)
    if blocks.first < 0 or blocks.length < 1 or blocks.first + blocks.length > len(buffer):
        raise fault(schedule, number, f"{blocks.buffer.name} has {len(buffer)} blocks on this rank")
    return buffer[blocks.first : blocks.first + blocks.length]


def _is_simple(kind: Kind, dst: Slice | None, src: Slice | None) -> bool:
    """Returns whether a step is sound at first sight, as most are: there are many, and `_check` takes longer."""
    if kind is _SEND:
        return dst is None and src is not None and src.buffer is not _WIRE
    if dst is None or dst.buffer is _INPUT or dst.buffer is _WIRE:
        return False
    return src is None if kind is _RECV else src is dst and kind is _REDUCE


def _wire_blocks(schedule: Schedule) -> int:
    slices = (blocks for step in schedule.steps for blocks in (step[2], step[3]) if blocks is not None)
    return max((blocks[1] + blocks[2] for blocks in slices if blocks[0] is _WIRE), default=0)


def _check_wire(schedule: Schedule, number: int) -> None:
    """Requires that a step uses WIRE as its kind may: only PACK, UNPACK and ADD convert, one block at a time."""
    kind, _, dst, src, _ = schedule.steps[number]
    to, source = dst is not None and dst.buffer is _WIRE, src is not None and src.buffer is _WIRE
    if any(blocks.length != 1 for blocks in (dst, src) if blocks is not None and (to or source)):
        raise fault(schedule, number, "blocks of WIRE are used one by one")
    if kind in _CONVERTING and (to, source) != ((True, False) if kind is Kind.PACK else (False, True)):
        raise fault(schedule, number, "PACK writes into WIRE; UNPACK and ADD read from there, and write elsewhere")
    if kind in (Kind.REDUCE, Kind.COPY) and (to or source):
        raise fault(schedule, number, f"{kind.name} takes no blocks of WIRE")


def _check(schedule: Schedule, number: int) -> None:
    kind, _, dst, src, final = schedule.steps[number]
    if final and kind not in (Kind.REDUCE, Kind.ADD):
        raise fault(schedule, number, "only a REDUCE or an ADD is final")
    if (src is None) != (kind is Kind.RECV) or (dst is None) != (kind is Kind.SEND):
        raise fault(schedule, number, "SEND has a src, RECV a dst, and all others have both")
    _check_wire(schedule, number)
    if dst is None:
        return
    if dst.buffer is Buffer.INPUT:
        raise fault(schedule, number, "INPUT is never written")
    if src is None or (src == dst and kind is Kind.REDUCE):
        return
    if src.length != dst.length:
        raise fault(schedule, number, "src and dst differ in their number of blocks")
    if src.buffer is dst.buffer and abs(src.first - dst.first) < src.length:
        raise fault(schedule, number, "src and dst overlap")
