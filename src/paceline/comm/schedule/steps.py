"""Schedule: the sends, receives, reductions and copies that a rank performs on slices of a few buffers.

A schedule is executed according to these rules:

- Each ordered pair of ranks is a first-in-first-out link. The k-th SEND to a peer matches the peer's k-th RECV or
  REDUCE from this rank, and both move the same number of bytes.
- A step starts once the earlier steps of its rank that access the same bytes in a conflicting way (read after write,
  write after read, write after write) have finished with these bytes. No other order is imposed between different
  peers, or between sends and receives, so a long chain of steps forms a pipeline without being divided into smaller
  steps.
- A link may be unbuffered, so a SEND may remain incomplete until its receiver has received the data.
- An empty slice (in a barrier) has no bytes by which steps could be ordered. Instead, an empty SEND starts once all
  earlier receives of its rank are complete; an empty RECV may start at any time.

The operations use these buffers, where n is the world size:

| operation | INPUT (never written) | OUTPUT | SCRATCH |
| --- | --- | --- | --- |
| all_reduce | | the tensor in `blocks` nearly equal blocks, in place | divided like the tensor |
| reduce | the tensor, except on the root | the tensor in place, on the root only | divided like the tensor |
| broadcast | | the tensor in `blocks` nearly equal blocks | |
| all_gather | own tensor, block 0 | n equal blocks | |
| gather | own tensor, block 0 | n equal blocks, on the root only | n equal blocks |
| scatter | n equal blocks, on the root only | block 0 | n equal blocks |
| reduce_scatter | n equal blocks | block 0 | n equal blocks |
| all_to_all | n blocks, each with its own size | n blocks, each with its own size | |
| barrier | | | |

The schedules in `quantized.py` use a fourth buffer, WIRE, whose blocks are in the format in which they are sent between
hosts. WIRE consists of as many blocks as the schedule uses, each with the size of the packed data. Only PACK loses
precision.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias


class Operation(IntEnum):
    """A collective. The values are the codes in native/call/call.hpp; `str` returns the name, such as `all_reduce`."""

    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:  # int's `__format__` would return the number
        return format(str(self), spec)

    @classmethod
    def named(cls, name: str) -> Operation:
        """Returns the operation with the given name.

        Raises:
            ValueError: the name is unknown.
        """
        for operation in cls:
            if str(operation) == name:
                return operation
        raise ValueError(f"unknown operation {name!r}; the operations are {', '.join(map(str, cls))}")


ROOTED = frozenset((Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER))


class Buffer(IntEnum):
    """A buffer of a rank; the table in the module's docstring lists its content for each operation."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2
    WIRE = 3


class StepKind(IntEnum):
    """The kind of a step; see `Step`."""

    SEND = 0
    RECV = 1
    REDUCE = 2
    COPY = 3
    PACK = 4
    UNPACK = 5
    ADD = 6


class BufferSlice(NamedTuple):
    """The blocks first..first+length-1 of a buffer. (A tuple is created twice as fast as a frozen dataclass.)"""

    buffer: Buffer
    first: int
    length: int = 1


class Step(NamedTuple):
    """A step of a rank.

    SEND: send src to peer; RECV: receive dst from peer; REDUCE: receive from peer, then dst = src op received; COPY:
    dst = src; PACK: dst (in WIRE) = src rounded; UNPACK: dst = src (in WIRE); ADD: dst = dst + src (in WIRE).

    `final` is set on the REDUCE or ADD after which dst holds the contributions of all ranks; for an average, this step
    also divides.
    """

    kind: StepKind
    peer: int
    dst: BufferSlice | None
    src: BufferSlice | None
    final: bool = False


class Schedule(NamedTuple):
    """All steps of one rank in one collective."""

    operation: Operation
    algorithm: str
    rank: int
    world_size: int
    root: int
    blocks: int
    steps: tuple[Step, ...]


class RankTopology(NamedTuple):
    """The rank and the world for which a schedule is built. `root` is -1 if unused; `hosts` lists each host's ranks."""

    rank: int
    world_size: int
    root: int = -1
    hosts: Sequence[Sequence[int]] = ()


BlocksAndSteps: TypeAlias = tuple[int, list[Step]]
"""The result of an algorithm: the number of blocks into which a tensor is divided, and the steps."""

Builder: TypeAlias = Callable[[RankTopology], BlocksAndSteps]

NOTHING = BufferSlice(Buffer.OUTPUT, 0, 0)
OWN_INPUT = BufferSlice(Buffer.INPUT, 0, 1)
OWN_OUTPUT = BufferSlice(Buffer.OUTPUT, 0, 1)

# `tuple.__new__` is twice as fast as a named tuple's constructor, and the ring of a large world has tens of thousands
# of steps.
_new = tuple.__new__
_SEND, _RECV, _REDUCE, _COPY, _PACK, _UNPACK, _ADD = StepKind


def send(peer: int, src: BufferSlice) -> Step:
    """Returns a step that sends src to the peer."""
    return _new(Step, (_SEND, peer, None, src, False))


def receive(peer: int, dst: BufferSlice) -> Step:
    """Returns a step that receives dst from the peer."""
    return _new(Step, (_RECV, peer, dst, None, False))


def combine(peer: int, dst: BufferSlice, src: BufferSlice, final: bool = False) -> Step:
    """Returns a step that sets dst to the reduction of src and data received from the peer."""
    return _new(Step, (_REDUCE, peer, dst, src, final))


def copy(dst: BufferSlice, src: BufferSlice) -> Step:
    """Returns a step that sets dst to src."""
    return _new(Step, (_COPY, -1, dst, src, False))


def pack(dst: BufferSlice, src: BufferSlice) -> Step:
    """Returns a step that rounds src, a single block, into dst in WIRE."""
    return _new(Step, (_PACK, -1, dst, src, False))


def unpack(dst: BufferSlice, src: BufferSlice) -> Step:
    """Returns a step that unpacks src in WIRE into dst."""
    return _new(Step, (_UNPACK, -1, dst, src, False))


def add(dst: BufferSlice, src: BufferSlice, final: bool = False) -> Step:
    """Returns a step that unpacks src in WIRE and adds it to dst."""
    return _new(Step, (_ADD, -1, dst, src, final))


def contiguous_slices(buffer: Buffer, blocks: Iterable[int]) -> list[BufferSlice]:
    """Merges consecutive blocks into as few slices as possible, in order: 4, 5, 0, 1, 2 yield two slices."""
    found: list[BufferSlice] = []
    first = count = 0
    for block in blocks:
        if count and block == first + count:
            count += 1
            continue
        if count:
            found.append(BufferSlice(buffer, first, count))
        first, count = block, 1
    if count:
        found.append(BufferSlice(buffer, first, count))
    return found


def one_block_chunks(buffer: Buffer, blocks: Iterable[int]) -> list[list[BufferSlice]]:
    """Returns a separate chunk for each block."""
    return [[BufferSlice(buffer, block)] for block in blocks]


def rotated(ranks: Sequence[int], first: int) -> list[int]:
    """Rotates the ranks, preserving their cyclic order, to begin with `first`."""
    start = ranks.index(first)
    return [*ranks[start:], *ranks[:start]]


def flatten(schedule: Schedule) -> bytes:
    """Encodes each step as nine 32-bit integers, in the layout expected by native/executor/schedule.hpp."""
    flat = array("i")
    for step in schedule.steps:
        flat.extend((step.kind, step.final, step.peer, *_slice_numbers(step.dst), *_slice_numbers(step.src)))
    return flat.tobytes()


def _slice_numbers(slice_: BufferSlice | None) -> tuple[int, int, int]:
    return (slice_.buffer, slice_.first, slice_.length) if slice_ is not None else (1, 0, 0)


class HostPosition(NamedTuple):
    """The position of a rank among hosts: the rank is local[me], and `local` lists the ranks of hosts[host]."""

    hosts: Sequence[Sequence[int]]
    host: int
    local: Sequence[int]
    me: int

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(map(len, self.hosts))) == 1

    @property
    def rail(self) -> list[int]:
        """The ranks that have this rank's index on their hosts; for a leader, these are all leaders."""
        return [host[self.me] for host in self.hosts]


def find_host_position(topology: RankTopology) -> HostPosition:
    """Returns this rank's position. If there is a root, the root's host and the root are moved to the front.

    Raises:
        ValueError: the hosts do not list each rank exactly once.
    """
    if sorted(rank for host in topology.hosts for rank in host) != list(range(topology.world_size)) or not all(
        topology.hosts
    ):
        raise ValueError(
            f"the algorithm needs hosts that list each of the {topology.world_size} ranks once, with no host empty; "
            f"got {topology.hosts}"
        )
    hosts = topology.hosts
    if topology.root >= 0:
        first = next(number for number, host in enumerate(hosts) if topology.root in host)
        hosts = [rotated(hosts[first], topology.root), *hosts[first + 1 :], *hosts[:first]]
    number = next(number for number, host in enumerate(hosts) if topology.rank in host)
    return HostPosition(hosts, number, hosts[number], hosts[number].index(topology.rank))
