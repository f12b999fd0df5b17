"""Plans a call for NCCL: calls on contiguous buffers, and copies from and to tensors that are not contiguous.

The choice of NCCL calls depends only on what all ranks know alike, never on the addresses of a rank's tensors:
reductions in place and broadcasts take one call for each piece; everything else takes one call for each pair of ranks,
or one in all. Pieces that do not follow each other in memory pass through a contiguous buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.engine.channel import Pieces
from paceline.schedule.steps import Operation

Room = Callable[[int], int]
"""Returns the address of new memory on the device, of the given number of bytes."""

_Segment = tuple[int, int]  # address, bytes


class Kind(Enum):
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
    """One NCCL call; `nbytes` is the size of one rank's part, and `peer` is the root or the other end."""

    kind: Kind
    source: int
    target: int
    nbytes: int
    peer: int = -1


@dataclass(frozen=True)
class Copy:
    """A copy within the device."""

    source: int
    target: int
    nbytes: int


@dataclass
class Plan:
    """The steps of a call: the copies before, the calls of one NCCL group, and the copies after."""

    calls: list[NcclCall] = field(default_factory=list)
    before: list[Copy] = field(default_factory=list)
    after: list[Copy] = field(default_factory=list)


def plan(
    operation: Operation, rank: int, root: int, inputs: Sequence[Pieces], outputs: Sequence[Pieces], room: Room
) -> Plan:
    """Returns the plan of a call; the arguments are as in `engine.channel.Call`, and `room` returns new memory."""
    made = Plan()
    if operation in _IN_PLACE:
        kind = _IN_PLACE[operation]
        for address, nbytes in _segments(outputs):
            target = 0 if kind is Kind.REDUCE and rank != root else address
            made.calls.append(NcclCall(kind, address, target, nbytes, root))
    elif operation == Operation.ALL_GATHER:
        source = _source(made, inputs, room)
        target = _target(made, outputs, room)
        _add(made, Kind.ALL_GATHER, source, target, _nbytes(inputs))
    elif operation == Operation.REDUCE_SCATTER:
        source = _source(made, inputs, room)
        target = _target(made, outputs, room)
        _add(made, Kind.REDUCE_SCATTER, source, target, _nbytes(outputs))
    else:
        sent, received = _parts(operation, rank, root, inputs, outputs)
        for peer in sorted({*sent, *received} - {rank}):
            if peer in sent:
                _add(made, Kind.SEND, _source(made, [sent[peer]], room), 0, _nbytes([sent[peer]]), peer)
            if peer in received:
                _add(made, Kind.RECEIVE, 0, _target(made, [received[peer]], room), _nbytes([received[peer]]), peer)
        made.before += _copies(_segments([sent.get(rank, ())]), _segments([received.get(rank, ())]))
    return made


_IN_PLACE: Mapping[Operation, Kind] = {
    Operation.ALL_REDUCE: Kind.ALL_REDUCE,
    Operation.BROADCAST: Kind.BROADCAST,
    Operation.REDUCE: Kind.REDUCE,
}


def plan_message(kind: Kind, peer: int, tensor: Pieces, room: Room) -> Plan:
    """Returns the plan of a send to `peer`, or of a receive from it."""
    made = Plan()
    if kind is Kind.SEND:
        _add(made, kind, _source(made, [tensor], room), 0, _nbytes([tensor]), peer)
    else:
        _add(made, kind, 0, _target(made, [tensor], room), _nbytes([tensor]), peer)
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


def _add(made: Plan, kind: Kind, source: int, target: int, nbytes: int, peer: int = -1) -> None:
    if nbytes:
        made.calls.append(NcclCall(kind, source, target, nbytes, peer))


def _source(made: Plan, lists: Sequence[Pieces], room: Room) -> int:
    """Returns the address at which the input is contiguous once the copies before the calls have run."""
    segments = _segments(lists)
    if _is_flat(segments):
        return segments[0][0] if segments else 0
    flat = room(_nbytes(lists))
    made.before += _copies(segments, [(flat, _nbytes(lists))])
    return flat


def _target(made: Plan, lists: Sequence[Pieces], room: Room) -> int:
    """Returns the address of a contiguous output, from which the copies after the calls fill the tensors."""
    segments = _segments(lists)
    if _is_flat(segments):
        return segments[0][0] if segments else 0
    flat = room(_nbytes(lists))
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
    return all(address + nbytes == after for (address, nbytes), (after, _) in itertools.pairwise(segments))


def _copies(sources: Sequence[_Segment], targets: Sequence[_Segment]) -> Iterator[Copy]:
    """Yields the copies between two lists of segments of the same total size, whose boundaries may differ."""
    left, right = list(sources[::-1]), list(targets[::-1])
    while left and right:
        (source, has), (target, wants) = left.pop(), right.pop()
        nbytes = min(has, wants)
        if source != target:
            yield Copy(source, target, nbytes)
        if has > nbytes:
            left.append((source + nbytes, has - nbytes))
        if wants > nbytes:
            right.append((target + nbytes, wants - nbytes))
