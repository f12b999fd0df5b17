"""Proof, by symbolic execution, that the ranks' schedules implement their operation correctly.

`verify` runs all schedules on symbolic values over unbuffered links, block by block, and processes each block as soon
as the rules in `steps.py` allow. A single run is sufficient, because the schedules alone, and not the order of events,
determine what a step waits for. Therefore either every order of events completes or every order deadlocks.

The value of a block is (identity, contributors): the number of the block, and a bit mask of the ranks whose
contributions are included in its sum. The blocks of all ranks form one array of places. A barrier has no blocks, so a
separate proof shows that no rank leaves before all ranks have arrived, and that no rank waits forever.

Synthesized schedules are proved before they run, and all other schedules only in tests.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple, TypeAlias

from paceline.comm.schedule.steps import Buffer, BufferSlice, Operation, Schedule, Step, StepKind
from paceline.errors import and_more

BlockValue: TypeAlias = tuple[int, int]
Blocks: TypeAlias = list[BlockValue | None]

REDUCING = frozenset((Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER))
CUT_LIKE_THE_TENSOR = frozenset((Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST))

# `tuple.__new__` is twice as fast as a named tuple's constructor, and there are many transfers.
_new = tuple.__new__
_SEND, _RECV, _REDUCE, *_ = StepKind
_LOCAL = frozenset(StepKind) - {_SEND, _RECV, _REDUCE}
_INPUT, _WIRE = Buffer.INPUT, Buffer.WIRE
_CONVERTING = frozenset((StepKind.PACK, StepKind.UNPACK, StepKind.ADD))


class ScheduleError(AssertionError):
    """The ranks' schedules do not implement their operation; the message reports the rank and the step."""


class StepTransfer(NamedTuple):
    """A transfer of blocks from a SEND to the step that receives them, or within a local step."""

    source: int
    source_step: int
    target: int
    target_step: int


def transfers_by_link(schedules: Sequence[Schedule]) -> list[list[StepTransfer]]:
    """Returns an ordered list of transfers for every link, and a separate list for every local step.

    The k-th SEND on a link is matched with the k-th RECV or REDUCE.

    Raises:
        ScheduleError: a step's peer is not another rank, or a SEND and its RECV or REDUCE do not match.
    """
    sends: dict[tuple[int, int], list[int]] = defaultdict(list)
    receives: dict[tuple[int, int], list[int]] = defaultdict(list)
    transfers: list[list[StepTransfer]] = []
    for rank, schedule in enumerate(schedules):
        for number, (kind, peer, _, _, _) in enumerate(schedule.steps):
            if kind in _LOCAL:
                transfers.append([StepTransfer(rank, number, rank, number)])
            elif peer == rank or not 0 <= peer < len(schedules):
                raise step_error(schedule, number, f"peer {peer} does not exist")
            elif kind is _SEND:
                sends[rank, peer].append(number)
            else:
                receives[peer, rank].append(number)
    for link in {**sends, **receives}:
        transfers.append(_match_link(schedules, *link, sends[link], receives[link]))
    return transfers


def _match_link(
    schedules: Sequence[Schedule], source: int, target: int, sends: list[int], receives: list[int]
) -> list[StepTransfer]:
    met = []
    sent_steps, received_steps = schedules[source].steps, schedules[target].steps
    for sending, receiving in zip_longest(sends, receives):
        if receiving is None:
            raise step_error(schedules[source], sending, f"rank {target} never receives it")
        if sending is None:
            raise step_error(schedules[target], receiving, f"rank {source} never sends it")
        src, dst = sent_steps[sending][3], received_steps[receiving][2]
        if not (src and dst and src[2] == dst[2]):
            raise step_error(schedules[target], receiving, f"rank {source} sends {src and src.length} blocks for it")
        if (src[0] is Buffer.WIRE) != (dst[0] is Buffer.WIRE):
            raise step_error(schedules[target], receiving, f"rank {source} sends {_format_slice(src)} for it")
        met.append(_new(StepTransfer, (source, sending, target, receiving)))
    return met


def step_error(schedule: Schedule, number: int, what: str) -> ScheduleError:
    """Returns the error for a step; the message contains the step's index and text."""
    step = schedule.steps[number]
    where = f"{schedule.algorithm} {schedule.operation} of {schedule.world_size}, rank {schedule.rank}"
    return ScheduleError(f"{where}, step {number} ({format_step(step)}): {what}")


def format_step(step: Step) -> str:
    """Formats a step, such as `REDUCE OUTPUT[3:5] = OUTPUT[3:5] + from 2, final`."""
    match step.kind:
        case StepKind.SEND:
            return f"SEND {_format_slice(step.src)} to {step.peer}"
        case StepKind.RECV:
            return f"RECV {_format_slice(step.dst)} from {step.peer}"
        case StepKind.REDUCE:
            final = ", final" if step.final else ""
            return f"REDUCE {_format_slice(step.dst)} = {_format_slice(step.src)} + from {step.peer}{final}"
        case StepKind.COPY:
            return f"COPY {_format_slice(step.dst)} = {_format_slice(step.src)}"
        case StepKind.PACK | StepKind.UNPACK:
            return f"{step.kind.name} {_format_slice(step.dst)} = {_format_slice(step.src)}"
        case StepKind.ADD:
            final = ", final" if step.final else ""
            return f"ADD {_format_slice(step.dst)} = {_format_slice(step.dst)} + {_format_slice(step.src)}{final}"


def _format_slice(blocks: BufferSlice | None) -> str:
    if blocks is None:
        return "?"
    end = "" if blocks.length == 1 else f":{blocks.first + blocks.length}"
    return f"{blocks.buffer.name}[{blocks.first}{end}]"


def verify_barrier(schedules: Sequence[Schedule]) -> None:
    """Checks that every rank's arrival reaches every rank before that rank leaves.

    An empty SEND forwards the arrivals reported by earlier receives (in the order of steps), since it waits only for
    these receives. Other messages may have been received by then, but the proof must not rely on them.

    Raises:
        ScheduleError: a rank may leave too early, or waits forever.
    """
    for schedule in schedules:
        for number, step in enumerate(schedule.steps):
            blocks = step.src if step.kind == StepKind.SEND else step.dst
            if step.kind not in (StepKind.SEND, StepKind.RECV) or blocks is None or blocks.length:
                raise step_error(schedule, number, "a barrier sends and receives empty slices")
    received: list[dict[int, int | None]] = [
        {number: None for number, step in enumerate(schedule.steps) if step.kind == StepKind.RECV}
        for schedule in schedules
    ]
    links = [deque(transfers) for transfers in transfers_by_link(schedules)]
    progress = True
    while progress:
        progress = False
        for link in links:
            while link and (arrived := _ranks_arrived(received, link[0].source, link[0].source_step)) is not None:
                received[link[0].target][link[0].target_step] = arrived
                link.popleft()
                progress = True
    stuck = [link[0] for link in links if link]
    if stuck:
        transfer = min(stuck, key=lambda transfer: (transfer.source_step, transfer.source))
        raise step_error(
            schedules[transfer.source], transfer.source_step, "waits forever for an earlier receive of its rank"
        )
    for rank, schedule in enumerate(schedules):
        absent = ((1 << len(schedules)) - 1) & ~(_ranks_arrived(received, rank, len(schedule.steps)) or 0)
        if absent:
            missing = absent.bit_length() - 1
            raise ScheduleError(
                f"{schedule.algorithm} barrier: rank {rank} may leave before rank {missing} has arrived"
            )


def _ranks_arrived(received: Sequence[dict[int, int | None]], rank: int, before: int) -> int | None:
    """Returns a bit mask of the ranks known to have arrived before a step of `rank`; None if a receive is pending."""
    known = 1 << rank
    for number, arrived in received[rank].items():
        if number >= before:
            break
        if arrived is None:
            return None
        known |= arrived
    return known


def initial_buffers(schedule: Schedule) -> tuple[Blocks, Blocks, Blocks]:
    """Returns the rank's INPUT, OUTPUT and SCRATCH before its first step; None represents an undefined block."""
    n, rank, blocks = schedule.world_size, schedule.rank, schedule.blocks
    is_root = rank == schedule.root
    tensor: Blocks = [(block, 1 << rank) for block in range(blocks)]
    of_each: Blocks = [(block, 1 << rank) for block in range(n)]
    own: Blocks = [(rank, 1 << rank)]
    match schedule.operation:
        case Operation.ALL_REDUCE:
            return [], tensor, [None] * blocks
        case Operation.REDUCE:
            return ([], tensor, [None] * blocks) if is_root else (tensor, [], [None] * blocks)
        case Operation.BROADCAST:
            return [], tensor if is_root else [None] * blocks, []
        case Operation.ALL_GATHER:
            return own, [None] * n, []
        case Operation.GATHER:
            return own, [None] * n if is_root else [], [None] * n
        case Operation.SCATTER:
            return of_each if is_root else [], [None], [None] * n
        case Operation.REDUCE_SCATTER:
            return of_each, [None], [None] * n
        case Operation.ALL_TO_ALL:
            return of_each, [None] * n, []
        case Operation.BARRIER:
            return [], [], []


def required_output(schedule: Schedule) -> Blocks:
    """Returns the required content of OUTPUT on the schedule's rank after its last step."""
    n, rank, root = schedule.world_size, schedule.rank, schedule.root
    all_ranks = (1 << n) - 1
    match schedule.operation:
        case Operation.ALL_REDUCE:
            return [(block, all_ranks) for block in range(schedule.blocks)]
        case Operation.REDUCE:
            return [(block, all_ranks) for block in range(schedule.blocks)] if rank == root else []
        case Operation.BROADCAST:
            return [(block, 1 << root) for block in range(schedule.blocks)]
        case Operation.ALL_GATHER:
            return [(source, 1 << source) for source in range(n)]
        case Operation.GATHER:
            return [(source, 1 << source) for source in range(n)] if rank == root else []
        case Operation.SCATTER:
            return [(rank, 1 << root)]
        case Operation.REDUCE_SCATTER:
            return [(rank, all_ranks)]
        case Operation.ALL_TO_ALL:
            return [(rank, 1 << source) for source in range(n)]
        case Operation.BARRIER:
            return []


def block_fits(operation: Operation, rank: int, index: int, value: BlockValue) -> bool:
    """Returns True if a block of a writable buffer has the same size as the value; block sizes may differ."""
    if operation in CUT_LIKE_THE_TENSOR:
        return value[0] == index
    return operation is not Operation.ALL_TO_ALL or value == (rank, 1 << index)


Accesses: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""The places that a step reads and those that it writes, block by block, with the number of earlier accesses to each.

A read waits until all writes to the place by earlier steps of its rank are complete; a write waits until all accesses
to the place by earlier steps are complete. A step that updates in place (src is dst) is one write.
"""


class SymbolicMemory:
    """The `values` of all places, and how often each place has been `written` and `accessed` (read or written)."""

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
        number = len(Buffer) * rank + buffer
        return range(self._firsts[number], self._firsts[number + 1])

    def start(self, rank: int, buffer: Buffer) -> int:
        """Returns the first place of a rank's buffer."""
        return self._firsts[len(Buffer) * rank + buffer]

    def name(self, place: int, rank: int) -> str:
        """Formats a place, such as `OUTPUT[3]`."""
        for buffer in Buffer:
            places = self.buffer(rank, buffer)
            if place in places:
                return f"{buffer.name}[{place - places.start}]"
        raise IndexError(place)


def _plan_accesses(memory: SymbolicMemory, schedules: Sequence[Schedule]) -> list[list[Accesses]]:
    """Returns the accesses by every rank's steps, which follow from the order of the steps."""
    written = [0] * len(memory.values)
    accessed = [0] * len(memory.values)
    planned: list[list[Accesses]] = []
    nothing: list[tuple[int, int]] = []
    for schedule in schedules:
        of_rank: list[Accesses] = []
        places: dict[BufferSlice, range] = {}
        for number, (kind, _, dst, src, final) in enumerate(schedule.steps):
            if final or not _is_simple(kind, dst, src):
                _check_step(schedule, number)
            reads = writes = nothing
            if src is not None and src is not dst and src != dst:
                found = places.get(src) or places.setdefault(src, _places(memory, schedule, number, src))
                reads = [(place, written[place]) for place in found]
                for place in found:
                    accessed[place] += 1
            if dst is not None:
                found = places.get(dst) or places.setdefault(dst, _places(memory, schedule, number, dst))
                writes = [(place, accessed[place]) for place in found]
                for place in found:
                    accessed[place] += 1
                    written[place] += 1
            of_rank.append((reads, writes))
        planned.append(of_rank)
    return planned


def _places(memory: SymbolicMemory, schedule: Schedule, number: int, blocks: BufferSlice) -> range:
    buffer = memory.buffer(schedule.rank, blocks.buffer)
    if blocks.first < 0 or blocks.length < 1 or blocks.first + blocks.length > len(buffer):
        raise step_error(schedule, number, f"{blocks.buffer.name} has {len(buffer)} blocks on this rank")
    return buffer[blocks.first : blocks.first + blocks.length]


def _is_simple(kind: StepKind, dst: BufferSlice | None, src: BufferSlice | None) -> bool:
    """Returns True if a step is obviously valid. (Most steps are; others require the slower `_check_step`.)"""
    if kind is _SEND:
        return dst is None and src is not None and src.buffer is not _WIRE
    if dst is None or dst.buffer is _INPUT or dst.buffer is _WIRE:
        return False
    return src is None if kind is _RECV else src is dst and kind is _REDUCE


def _wire_blocks(schedule: Schedule) -> int:
    slices = (blocks for step in schedule.steps for blocks in (step[2], step[3]) if blocks is not None)
    return max((blocks[1] + blocks[2] for blocks in slices if blocks[0] is _WIRE), default=0)


def _check_wire(schedule: Schedule, number: int) -> None:
    """Checks the use of WIRE: only PACK, UNPACK and ADD may convert data, one block at a time."""
    kind, _, dst, src, _ = schedule.steps[number]
    to, source = dst is not None and dst.buffer is _WIRE, src is not None and src.buffer is _WIRE
    if any(blocks.length != 1 for blocks in (dst, src) if blocks is not None and (to or source)):
        raise step_error(schedule, number, "blocks of WIRE are used one by one")
    if kind in _CONVERTING and (to, source) != ((True, False) if kind is StepKind.PACK else (False, True)):
        raise step_error(schedule, number, "PACK writes into WIRE; UNPACK and ADD read from there, and write elsewhere")
    if kind in (StepKind.REDUCE, StepKind.COPY) and (to or source):
        raise step_error(schedule, number, f"{kind.name} cannot use blocks of WIRE")


def _check_step(schedule: Schedule, number: int) -> None:
    kind, _, dst, src, final = schedule.steps[number]
    if final and kind not in (StepKind.REDUCE, StepKind.ADD):
        raise step_error(schedule, number, "only a REDUCE or an ADD is final")
    if (src is None) != (kind is StepKind.RECV) or (dst is None) != (kind is StepKind.SEND):
        raise step_error(schedule, number, "SEND has a src, RECV a dst, and all others have both")
    _check_wire(schedule, number)
    if dst is None:
        return
    if dst.buffer is Buffer.INPUT:
        raise step_error(schedule, number, "INPUT is never written")
    if src is None or (src == dst and kind is StepKind.REDUCE):
        return
    if src.length != dst.length:
        raise step_error(schedule, number, "src and dst differ in their number of blocks")
    if src.buffer is dst.buffer and abs(src.first - dst.first) < src.length:
        raise step_error(schedule, number, "src and dst overlap")


def verify(schedules: Sequence[Schedule]) -> None:
    """Proves the schedules of all ranks, in rank order.

    The proof shows that at the end every block holds each required contribution exactly once and no other contribution;
    INPUT is never written; no block is read before it is written; blocks are stored only in places of the same size;
    `final` is set exactly on the step that adds the last contribution; every SEND matches a step with the same number
    of blocks; and no step waits forever, even if links are unbuffered.

    Raises:
        ScheduleError: the schedules are wrong; the message describes the first fault, with the rank and the step.
    """
    first = schedules[0]
    for rank, schedule in enumerate(schedules):
        if (rank, len(schedules)) != (schedule.rank, schedule.world_size):
            found = f"rank {schedule.rank} of {schedule.world_size}"
            raise ScheduleError(
                f"schedule {rank} of {len(schedules)} belongs to {found}: pass all schedules in rank order"
            )
        if (schedule.operation, schedule.root, schedule.blocks) != (first.operation, first.root, first.blocks):
            raise ScheduleError(f"rank {rank} and rank 0 differ in operation, root or number of blocks")
    if first.operation is Operation.BARRIER:
        verify_barrier(schedules)
    else:
        world = _SymbolicExecutor(schedules)
        world.run()
        world.check_output()


_Wait: TypeAlias = tuple[int, int, int]
"""A place, a rank and a step's number; the step must wait until an earlier step has read or written the place."""


class _SymbolicExecutor:
    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules
        self.memory = SymbolicMemory(schedules)
        self.all_ranks = (1 << len(schedules)) - 1
        self.ready: deque[Iterator[_Wait]] = deque()
        self.waiting: dict[int, list[tuple[_Wait, Iterator[_Wait]]]] = {}

    def run(self) -> None:
        """Runs every link until the link must wait for a place; the link resumes when the place changes."""
        self.ready.extend(self.link(transfers) for transfers in transfers_by_link(self.schedules))
        while self.ready:
            link = self.ready.popleft()
            wait = next(link, None)
            if wait is not None:
                self.waiting.setdefault(wait[0], []).append((wait, link))
        if self.waiting:
            waits = [wait for waiters in self.waiting.values() for wait, _ in waiters]
            place, rank, number = min(waits, key=lambda wait: (wait[2], wait[1]))
            what = f"waits forever for an earlier step on {self.memory.name(place, rank)}"
            raise step_error(self.schedules[rank], number, what)

    def link(self, transfers: list[StepTransfer]) -> Iterator[_Wait]:
        """Executes the transfers of a link, block by block; yields a `_Wait` for each place that is not ready."""
        # Nearly all of the time is spent here, so the loop uses local variables.
        memory, waiting, ready, all_ranks = self.memory, self.waiting, self.ready, self.all_ranks
        values, written, accessed, accesses = memory.values, memory.written, memory.accessed, memory.accesses
        operation = self.schedules[0].operation
        fits_by_index = operation in CUT_LIKE_THE_TENSOR
        reduces = operation in REDUCING
        for source, source_step, target, target_step in transfers:
            reads = accesses[source][source_step][0]
            own_reads, writes = accesses[target][target_step]
            kind, _, dst_slice, src_slice, final = self.schedules[target].steps[target_step]
            adding = kind is StepKind.REDUCE or kind is StepKind.ADD
            apart = kind is StepKind.REDUCE and src_slice != dst_slice
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
                    raise step_error(self.schedules[source], source_step, f"{memory.name(src, source)} is undefined")
                if adding:
                    mine = values[own]
                    if mine is None or mine[0] != value[0] or mine[1] & value[1] or not reduces:
                        raise self.cannot_add(mine, value, target, target_step)
                    contributors = mine[1] | value[1]
                    if (contributors == all_ranks) != final:
                        raise self.is_not_final(contributors, target, target_step)
                    value = (value[0], contributors)
                if into_wire:
                    if (values[dst] or value)[0] != value[0]:
                        what = f"block {value[0]} is stored in place of another block, which may have a different size"
                        raise step_error(self.schedules[target], target_step, what)
                elif (
                    value[0] != dst - start if fits_by_index else not block_fits(operation, target, dst - start, value)
                ):
                    what = f"block {value[0]} is stored in {memory.name(dst, target)}, which may have a different size"
                    raise step_error(self.schedules[target], target_step, what)
                values[dst] = value
                written[dst] += 1
                for place in (src, dst, own) if apart else (src, dst):
                    accessed[place] += 1
                    if place in waiting:
                        ready.extend([link for _, link in waiting.pop(place)])

    def cannot_add(self, own: BlockValue | None, received: BlockValue, rank: int, number: int) -> ScheduleError:
        """Returns the error for the addition of two values whose blocks differ or whose contributors overlap."""
        schedule = self.schedules[rank]
        if schedule.operation not in REDUCING:
            return step_error(schedule, number, f"{schedule.operation} reduces nothing")
        if own is None:
            return step_error(schedule, number, "its src is undefined")
        if own[0] != received[0]:
            return step_error(schedule, number, f"adds block {received[0]} to block {own[0]}")
        twice = own[1] & received[1]
        return step_error(schedule, number, f"counts the contributions of ranks {_ranks(twice)} twice")

    def is_not_final(self, contributors: int, rank: int, number: int) -> ScheduleError:
        """Returns the error for a step that adds up `contributors` but whose `final` flag is wrong."""
        schedule = self.schedules[rank]
        if missing := self.all_ranks & ~contributors:
            what = f"is marked final, but the contributions of ranks {_ranks(missing)} are missing"
            return step_error(schedule, number, what)
        return step_error(schedule, number, "has all contributions, but is not marked final")

    def check_output(self) -> None:
        """Compares each rank's OUTPUT with the required content."""
        for rank, schedule in enumerate(self.schedules):
            places = self.memory.buffer(rank, Buffer.OUTPUT)
            for index, (place, promised) in enumerate(zip(places, required_output(schedule), strict=True)):
                if self.memory.values[place] != promised:
                    where = f"{schedule.algorithm} {schedule.operation} of {schedule.world_size}, rank {rank}"
                    found, wanted = _format_value(self.memory.values[place]), _format_value(promised)
                    raise ScheduleError(f"{where}, at the end: OUTPUT[{index}] holds {found} instead of {wanted}")


def _format_value(value: BlockValue | None) -> str:
    return "nothing" if value is None else f"block {value[0]} of ranks {_ranks(value[1])}"


def _ranks(mask: int) -> str:
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    return and_more(ranks, 8)
