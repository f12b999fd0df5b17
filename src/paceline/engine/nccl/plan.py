"""What a call comes to in NCCL: calls on flat buffers, and copies from and to tensors that do not lie flat.

Which NCCL calls are made follows from what all ranks know alike, never from where a rank's tensors happen to lie:
reductions in place and broadcasts are one call for each piece, everything else is one for each pair of ranks or one for
all. What is in several pieces, and does not lie one after the other, passes through a flat buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.engine.channel import Pieces
from paceline.engine.codes import Operation

Room = Callable[[int], int]
"""Gives the address of that many bytes of new memory on the device."""

_Segment = tuple[int, int]  # address, bytes


class Kind(Enum):
    """A function of NCCL."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    SEND = "send"
    RECEIVE = "recv"


@dataclass(frozen=True)
class NcclCall:
    """One call: `nbytes` as the function counts (of one rank's part), `peer` is its root or other end."""

    kind: Kind
    source: int
    target: int
    nbytes: int
    peer: int = -1


@dataclass(frozen=True)
class Copy:
    """Within the device."""

    source: int
    target: int
    nbytes: int


@dataclass
class Plan:
    """Copies, the calls of one NCCL group, copies; in this order."""

    calls: list[NcclCall] = field(default_factory=list)
    before: list[Copy] = field(default_factory=list)
    after: list[Copy] = field(default_factory=list)


def plan(operation: int, rank: int, root: int, inputs: Sequence[Pieces], outputs: Sequence[Pieces], room: Room) -> Plan:
    """The plan of a call, whose arguments are as `engine.channel.Channel` has them."""
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


_IN_PLACE: Mapping[int, Kind] = {
    Operation.ALL_REDUCE: Kind.ALL_REDUCE,
    Operation.BROADCAST: Kind.BROADCAST,
    Operation.REDUCE: Kind.REDUCE,
}


def plan_message(kind: Kind, peer: int, tensor: Pieces, room: Room) -> Plan:
    """The plan of a send to `peer`, or a receive from it."""
    made = Plan()
    if kind is Kind.SEND:
        _add(made, kind, _source(made, [tensor], room), 0, _nbytes([tensor]), peer)
    else:
        _add(made, kind, 0, _target(made, [tensor], room), _nbytes([tensor]), peer)
    return made


def _parts(
    operation: int, rank: int, root: int, inputs: Sequence[Pieces], outputs: Sequence[Pieces]
) -> tuple[dict[int, Pieces], dict[int, Pieces]]:
    """What goes to, and comes from, which rank."""
    if operation == Operation.GATHER:
        return {root: inputs[0]}, dict(enumerate(outputs))
    if operation == Operation.SCATTER:
        return dict(enumerate(inputs)), {root: outputs[0]}
    return dict(enumerate(inputs)), dict(enumerate(outputs))


def _add(made: Plan, kind: Kind, source: int, target: int, nbytes: int, peer: int = -1) -> None:
    if nbytes:
        made.calls.append(NcclCall(kind, source, target, nbytes, peer))


def _source(made: Plan, lists: Sequence[Pieces], room: Room) -> int:
    """Where what is to be read lies flat, when the copies before have been made."""
    segments = _segments(lists)
    if _is_flat(segments):
        return segments[0][0] if segments else 0
    flat = room(_nbytes(lists))
    made.before += _copies(segments, [(flat, _nbytes(lists))])
    return flat


def _target(made: Plan, lists: Sequence[Pieces], room: Room) -> int:
    """Where to write flat, for the copies after to find it."""
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
    """Copies of memory that is cut in one way there and in another here."""
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
