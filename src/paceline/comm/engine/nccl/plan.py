"""Plans of calls for NCCL: calls on contiguous buffers, and copies from and to tensors that are not contiguous.

The choice of NCCL calls depends only on facts that are the same on all ranks, never on the addresses of a rank's
tensors: reductions in place and broadcasts are one call for each piece; other operations are one call for each pair of
ranks, or a single one. Pieces that are not adjacent in memory pass through a contiguous buffer.

Data that is only moved is passed as bytes. A dtype that NCCL lacks is reduced as another one with the same result:
booleans as bytes of 0 and 1, complex numbers as pairs of floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from paceline.comm.engine.channel import Pieces
from paceline.comm.engine.codes import ReduceOp, dtype_name
from paceline.comm.schedule.steps import Operation

FLOAT8_SINCE = 22400


class DataType(IntEnum):
    """The values of `ncclDataType_t`."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11


class RedOp(IntEnum):
    """The values of `ncclRedOp_t`."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class NcclReduction(NamedTuple):
    """A reduction in NCCL's terms: `op` on elements of `data_type`, of `item_size` bytes each."""

    data_type: DataType
    item_size: int
    op: RedOp


_INTEGERS = {
    "uint8": (DataType.UINT8, 1),
    "int8": (DataType.INT8, 1),
    "int32": (DataType.INT32, 4),
    "uint32": (DataType.UINT32, 4),
    "int64": (DataType.INT64, 8),
    "uint64": (DataType.UINT64, 8),
}
_FLOATS = {
    "float16": (DataType.FLOAT16, 2),
    "bfloat16": (DataType.BFLOAT16, 2),
    "float32": (DataType.FLOAT32, 4),
    "float64": (DataType.FLOAT64, 8),
}
_PAIRS = {
    "complex32": (DataType.FLOAT16, 2),
    "complex64": (DataType.FLOAT32, 4),
    "complex128": (DataType.FLOAT64, 8),
}
_FLOAT8 = {"float8_e4m3fn": (DataType.FLOAT8_E4M3, 1), "float8_e5m2": (DataType.FLOAT8_E5M2, 1)}

_OF_NUMBERS = {
    ReduceOp.SUM: RedOp.SUM,
    ReduceOp.PRODUCT: RedOp.PROD,
    ReduceOp.MIN: RedOp.MIN,
    ReduceOp.MAX: RedOp.MAX,
    ReduceOp.PREMUL_SUM: RedOp.SUM,  # the tensors have been multiplied already
    ReduceOp.AVG: RedOp.AVG,
}
_OF_PAIRS = {code: _OF_NUMBERS[code] for code in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)}
_OF_BOOLEANS = dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), RedOp.MAX)
_OF_BOOLEANS |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), RedOp.MIN)


def find_reduction(dtype: int, reduce_op: int, version: int) -> NcclReduction | None:
    """Returns the reduction in terms of NCCL of this version, or None if NCCL does not have it."""
    name, code = dtype_name(dtype), ReduceOp(reduce_op)
    if name == "bool":
        known, ops = (DataType.UINT8, 1), _OF_BOOLEANS
    elif name in _PAIRS:
        known, ops = _PAIRS[name], _OF_PAIRS
    elif name in _INTEGERS:
        known, ops = _INTEGERS[name], _OF_NUMBERS
    elif name in _FLOATS or (name in _FLOAT8 and version >= FLOAT8_SINCE):
        known, ops = (_FLOATS | _FLOAT8)[name], _OF_NUMBERS
    else:
        return None
    op = ops.get(code)
    return None if op is None else NcclReduction(*known, op)


AllocateBuffer = Callable[[int], int]
"""A function that returns the address of new device memory with the given number of bytes."""

_Segment = tuple[int, int]  # address, bytes


class NcclFunction(Enum):
    """The NCCL function of a call."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    SEND = "send"
    RECEIVE = "recv"


@dataclass(frozen=True)
class NcclCall:
    """One NCCL call; `nbytes` is the size of one rank's part, and `peer` the root or the other end."""

    kind: NcclFunction
    source: int
    target: int
    nbytes: int
    peer: int = -1


@dataclass(frozen=True)
class DeviceCopy:
    """A copy within the device."""

    source: int
    target: int
    nbytes: int


@dataclass
class NcclPlan:
    """The steps of a call: the copies before, the calls of one NCCL group, and the copies after."""

    calls: list[NcclCall] = field(default_factory=list)
    before: list[DeviceCopy] = field(default_factory=list)
    after: list[DeviceCopy] = field(default_factory=list)


def plan(
    operation: Operation,
    rank: int,
    root: int,
    inputs: Sequence[Pieces],
    outputs: Sequence[Pieces],
    allocate: AllocateBuffer,
) -> NcclPlan:
    """Returns the plan of a call; the arguments are as in `engine.channel.CollectiveCall`."""
    made = NcclPlan()
    if operation in _IN_PLACE:
        kind = _IN_PLACE[operation]
        for address, nbytes in _segments(outputs):
            target = 0 if kind is NcclFunction.REDUCE and rank != root else address
            made.calls.append(NcclCall(kind, address, target, nbytes, root))
    elif operation == Operation.ALL_GATHER:
        source = _source(made, inputs, allocate)
        target = _target(made, outputs, allocate)
        _add(made, NcclFunction.ALL_GATHER, source, target, _nbytes(inputs))
    elif operation == Operation.REDUCE_SCATTER:
        source = _source(made, inputs, allocate)
        target = _target(made, outputs, allocate)
        _add(made, NcclFunction.REDUCE_SCATTER, source, target, _nbytes(outputs))
    else:
        sent, received = _parts(operation, rank, root, inputs, outputs)
        for peer in sorted({*sent, *received} - {rank}):
            if peer in sent:
                _add(made, NcclFunction.SEND, _source(made, [sent[peer]], allocate), 0, _nbytes([sent[peer]]), peer)
            if peer in received:
                _add(
                    made,
                    NcclFunction.RECEIVE,
                    0,
                    _target(made, [received[peer]], allocate),
                    _nbytes([received[peer]]),
                    peer,
                )
        made.before += _copies(_segments([sent.get(rank, ())]), _segments([received.get(rank, ())]))
    return made


_IN_PLACE: Mapping[Operation, NcclFunction] = {
    Operation.ALL_REDUCE: NcclFunction.ALL_REDUCE,
    Operation.BROADCAST: NcclFunction.BROADCAST,
    Operation.REDUCE: NcclFunction.REDUCE,
}


def plan_message(kind: NcclFunction, peer: int, tensor: Pieces, allocate: AllocateBuffer) -> NcclPlan:
    """Returns the plan of a send to `peer`, or of a receive from it."""
    made = NcclPlan()
    if kind is NcclFunction.SEND:
        _add(made, kind, _source(made, [tensor], allocate), 0, _nbytes([tensor]), peer)
    else:
        _add(made, kind, 0, _target(made, [tensor], allocate), _nbytes([tensor]), peer)
    return made


def _parts(
    operation: Operation, rank: int, root: int, inputs: Sequence[Pieces], outputs: Sequence[Pieces]
) -> tuple[dict[int, Pieces], dict[int, Pieces]]:
    """Returns the tensors to send, by receiver, and the tensors to receive, by sender."""
    if operation == Operation.GATHER:
        return {root: inputs[0]}, dict(enumerate(outputs))
    if operation == Operation.SCATTER:
        return dict(enumerate(inputs)), {root: outputs[0]}
    return dict(enumerate(inputs)), dict(enumerate(outputs))


def _add(made: NcclPlan, kind: NcclFunction, source: int, target: int, nbytes: int, peer: int = -1) -> None:
    if nbytes:
        made.calls.append(NcclCall(kind, source, target, nbytes, peer))


def _source(made: NcclPlan, lists: Sequence[Pieces], allocate: AllocateBuffer) -> int:
    """Returns the address of the input, contiguous after the copies that precede the calls."""
    segments = _segments(lists)
    if _is_flat(segments):
        return segments[0][0] if segments else 0
    flat = allocate(_nbytes(lists))
    made.before += _copies(segments, [(flat, _nbytes(lists))])
    return flat


def _target(made: NcclPlan, lists: Sequence[Pieces], allocate: AllocateBuffer) -> int:
    """Returns the address of a contiguous output, from which the copies that follow the calls fill the tensors."""
    segments = _segments(lists)
    if _is_flat(segments):
        return segments[0][0] if segments else 0
    flat = allocate(_nbytes(lists))
    made.after += _copies([(flat, _nbytes(lists))], segments)
    return flat


def _segments(lists: Iterable[Pieces]) -> list[_Segment]:
    return [
        (address, nbytes)
        for pieces in lists
        for address, nbytes in zip(pieces[::2], pieces[1::2], strict=True)
        if nbytes
    ]


def _nbytes(lists: Iterable[Pieces]) -> int:
    return sum(sum(pieces[1::2]) for pieces in lists)


def _is_flat(segments: Sequence[_Segment]) -> bool:
    return all(address + nbytes == following for (address, nbytes), (following, _) in itertools.pairwise(segments))


def _copies(sources: Sequence[_Segment], targets: Sequence[_Segment]) -> Iterator[DeviceCopy]:
    """Yields the copies between two lists of segments of the same total size, whose boundaries may differ."""
    left, right = list(sources[::-1]), list(targets[::-1])
    while left and right:
        (source, available), (target, capacity) = left.pop(), right.pop()
        nbytes = min(available, capacity)
        if source != target:
            yield DeviceCopy(source, target, nbytes)
        if available > nbytes:
            left.append((source + nbytes, available - nbytes))
        if capacity > nbytes:
            right.append((target + nbytes, capacity - nbytes))
