"""What a schedule is: a rank's sends, receives, reductions and copies over slices of a few buffers.

How a schedule is executed, and what its author may rely on:

- Each ordered pair of ranks is a first-in-first-out link. The k-th SEND to a peer meets the peer's k-th RECV or REDUCE
  from this rank, and both move equally many bytes.
- A step starts once the earlier steps of its rank that touch the same bytes in a conflicting way (read after write,
  write after read, write after write) are done with these bytes. Otherwise the order between different peers, and
  between sending and receiving, is free: a long chain of steps is a pipeline without being cut up.
- A link may hold nothing: a SEND may end only when its receiver has taken it.
- A slice of no blocks (in a barrier) has no bytes that could order it. Instead a SEND of nothing starts once all
  earlier receives of its rank are done; a RECV of nothing may always start.

These are the buffers of each operation, where n is the world size. It has no others:

| operation | INPUT (never written) | OUTPUT | SCRATCH |
| --- | --- | --- | --- |
| all_reduce | | the tensor in `blocks` nearly equal blocks, in place | cut like the tensor |
| reduce | the tensor, on all but the root | the tensor in place, on the root only | cut like the tensor |
| broadcast | | the tensor in `blocks` nearly equal blocks | |
| all_gather | own tensor, block 0 | n equal blocks | |
| gather | own tensor, block 0 | n equal blocks, on the root only | n equal blocks |
| scatter | n equal blocks, on the root only | block 0 | n equal blocks |
| reduce_scatter | n equal blocks | block 0 | n equal blocks |
| all_to_all | n blocks, each of its own size | n blocks, each of its own size | |
| barrier | | | |

The schedules of `quantised.py` have a fourth buffer, WIRE, of blocks in the form in which they travel between hosts. It
has as many as they use, and each is as large as the block that is packed into it, or unpacked from it, needs. PACK
rounds, and the other steps lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias


class Operation(IntEnum):
    """A collective. Its value is its number in native/call/call.hpp, and its text is its name: `all_reduce`."""

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

    def __format__(self, spec: str) -> str:  # that of an int would show the number
        return format(str(self), spec)

    @classmethod
    def named(cls, name: str) -> Operation:
        """Returns the operation of that name.

        Raises:
            ValueError: there is none.
        """
        for operation in cls:
            if str(operation) == name:
                return operation
        raise ValueError(f"there is no operation {name!r}; there are {', '.join(map(str, cls))}")


ROOTED = frozenset((Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER))


class Buffer(IntEnum):
    """Where a slice lies; the table above says what an operation keeps there."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2
    WIRE = 3


class Kind(IntEnum):
    """What a step does."""

    SEND = 0
    RECV = 1
    REDUCE = 2
    COPY = 3
    PACK = 4
    UNPACK = 5
    ADD = 6


class Slice(NamedTuple):
    """The blocks first..first+length-1 of a buffer. (A tuple is made in half the time of a frozen dataclass.)"""

    buffer: Buffer
    first: int
    length: int = 1


class Step(NamedTuple):
    """SEND src to peer; RECV dst from peer; REDUCE: receive, dst = src op received; COPY: dst = src.

    PACK: dst, in WIRE, = src rounded; UNPACK: dst = src, which is in WIRE; ADD: dst = dst + src, which is in WIRE.

    `final` is set on the REDUCE or ADD after which dst holds the contributions of all ranks: an average is divided
    there.
    """

    kind: Kind
    peer: int
    dst: Slice | None
    src: Slice | None
    final: bool = False


class Schedule(NamedTuple):
    """Everything that one rank does in one collective."""

    operation: Operation
    algorithm: str
    rank: int
    world_size: int
    root: int
    blocks: int
    steps: tuple[Step, ...]


class Place(NamedTuple):
    """The rank that a schedule is for. `root` is -1 if there is none; `hosts` lists the ranks of each host."""

    rank: int
    world_size: int
    root: int = -1
    hosts: Sequence[Sequence[int]] = ()


Plan: TypeAlias = tuple[int, list[Step]]
"""What an algorithm returns: into how many blocks a tensor is cut, and the steps."""

Builder: TypeAlias = Callable[[Place], Plan]

NOTHING = Slice(Buffer.OUTPUT, 0, 0)
OWN_INPUT = Slice(Buffer.INPUT, 0, 1)
OWN_OUTPUT = Slice(Buffer.OUTPUT, 0, 1)


# A large world's ring has tens of thousands of steps, and the constructor of a named tuple takes twice as long.
_new = tuple.__new__
_SEND, _RECV, _REDUCE, _COPY, _PACK, _UNPACK, _ADD = Kind


def send(peer: int, src: Slice) -> Step:
    """Returns a step that sends src to the peer."""
    return _new(Step, (_SEND, peer, None, src, False))


def receive(peer: int, dst: Slice) -> Step:
    """Returns a step that receives dst from the peer."""
    return _new(Step, (_RECV, peer, dst, None, False))


def combine(peer: int, dst: Slice, src: Slice, final: bool = False) -> Step:
    """Returns a step that receives from the peer and sets dst to src combined with it."""
    return _new(Step, (_REDUCE, peer, dst, src, final))


def copy(dst: Slice, src: Slice) -> Step:
    """Returns a step that sets dst to src."""
    return _new(Step, (_COPY, -1, dst, src, False))


def pack(dst: Slice, src: Slice) -> Step:
    """Returns a step that rounds src, one block, into dst, which is in WIRE."""
    return _new(Step, (_PACK, -1, dst, src, False))


def unpack(dst: Slice, src: Slice) -> Step:
    """Returns a step that sets dst to what src, in WIRE, stands for."""
    return _new(Step, (_UNPACK, -1, dst, src, False))


def add(dst: Slice, src: Slice, final: bool = False) -> Step:
    """Returns a step that adds to dst what src, in WIRE, stands for."""
    return _new(Step, (_ADD, -1, dst, src, final))


def runs(buffer: Buffer, blocks: Iterable[int]) -> list[Slice]:
    """Returns the blocks, in their order, as few slices: 4, 5, 0, 1, 2 are two."""
    found: list[Slice] = []
    first = count = 0
    for block in blocks:
        if count and block == first + count:
            count += 1
            continue
        if count:
            found.append(Slice(buffer, first, count))
        first, count = block, 1
    if count:
        found.append(Slice(buffer, first, count))
    return found


def singles(buffer: Buffer, blocks: Iterable[int]) -> list[list[Slice]]:
    """Returns one chunk for each block, which holds that block alone."""
    return [[Slice(buffer, block)] for block in blocks]


def rotated(ranks: Sequence[int], first: int) -> list[int]:
    """Returns the ranks in their order, beginning with `first`."""
    at = ranks.index(first)
    return [*ranks[at:], *ranks[:at]]
