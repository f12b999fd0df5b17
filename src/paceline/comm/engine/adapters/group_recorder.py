"""Records what one rank does in a group whose engine is not in the core: its calls, messages and their bytes.

A library does not say what it sends. Recorded is therefore what the rank contributes to a call, as bytes within the
host if the whole group is on it, otherwise between hosts. Nor does a library say which rank came last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline import _core
from paceline.comm.engine.channel import CollectiveCall, Pieces
from paceline.comm.engine.codes import ITEM_SIZES, NO_REDUCTION
from paceline.comm.engine.failures import OutcomeCode, RankIdentity
from paceline.comm.record.layout import RECEIVE, SEND
from paceline.comm.schedule.steps import Operation


class RecordedOperation(Protocol):
    """A call or a message in the recording."""

    def start(self) -> None:
        """Notes that it is its turn."""

    def end(self, outcome: int, /) -> None:
        """Notes that it is over, with a `failures.Code`."""


class RecordedWork:
    """A call or a message that has just been made; implements `Recorded`.

    Args:
        call: its entry.
        nbytes: what this rank contributes.
        is_within: whether those bytes stay within the host.
        source: of a receive, the group rank of the sender; -1 if any may be, and if it is no receive.
        receives: whether it is a receive.
    """

    def __init__(
        self, call: _core.RecordedCall, nbytes: int, is_within: bool, source: int = -1, receives: bool = False
    ) -> None:
        self._call = call
        self._nbytes = (nbytes, 0) if is_within else (0, nbytes)
        self._source = source
        self._receives = receives

    def start(self) -> None:
        """Notes that it is its turn."""
        self._call.start()

    def end(self, outcome: int, /) -> None:
        """Notes that it is over, with a `failures.Code`."""
        if outcome == OutcomeCode.OK:
            self._call.end(outcome, *self._nbytes, self._source)
        else:
            self._call.end(outcome)

    def end_from(self, source: int, outcome: int) -> None:
        """Notes that a message is over, which came from that group rank if it was received."""
        if self._receives:
            self._source = source
        self.end(outcome)


class GroupRecorder:
    """Records calls and messages as those of the group with the serial `group`; none as long as it is 0.

    Args:
        members: the group's members, by group rank.
        rank: the group rank of this process.
    """

    def __init__(self, members: Sequence[RankIdentity], rank: int) -> None:
        self.group = 0
        self._rank = rank
        self._host = [member.host == members[rank].host for member in members]
        self._is_within = all(self._host)
        self._calls = 0

    def call(self, call: CollectiveCall, is_async: bool) -> RecordedWork:
        """Records that a collective has been made, as the next of the group."""
        self._calls += 1
        fields = (call.operation, call.dtype, call.reduce_op, self._calls, call.count, call.root, is_async, -1)
        nbytes = contributed(call, self._rank)
        return RecordedWork(_core.RecordedCall(self.group, *fields), nbytes, self._is_within)

    def small_call(self, operation: int, dtype: int, reduce_op: int, count: int, nbytes: int) -> RecordedWork:
        """Records a collective without a root that runs at once."""
        self._calls += 1
        recorded = _core.RecordedCall(self.group, operation, dtype, reduce_op, self._calls, count, -1, False, -1)
        return RecordedWork(recorded, nbytes, self._is_within)

    def send(self, peer: int, tag: int, dtype: int, tensor: Pieces) -> RecordedWork:
        """Records that a send to a group rank has begun."""
        return self._message(SEND, peer, tag, dtype, tensor)

    def receive(self, peer: int, tag: int, dtype: int, tensor: Pieces) -> RecordedWork:
        """Records that a receive from a group rank has begun, or from any with -1."""
        return self._message(RECEIVE, peer, tag, dtype, tensor)

    def _message(self, operation: int, peer: int, tag: int, dtype: int, tensor: Pieces) -> RecordedWork:
        nbytes = sum(tensor[1::2])
        fields = (operation, dtype, NO_REDUCTION, 0, nbytes // ITEM_SIZES[dtype], peer, True, tag)
        recorded = _core.RecordedCall(self.group, *fields)
        recorded.start()
        if operation == RECEIVE:
            return RecordedWork(recorded, 0, True, peer, receives=True)
        return RecordedWork(recorded, nbytes, self._host[peer])


def contributed(call: CollectiveCall, rank: int) -> int:
    """Returns the bytes that a rank contributes to a call; `native/host/group.cpp` counts the same."""
    if call.operation == Operation.BROADCAST:
        return _nbytes(call.outputs) if rank == call.root else 0
    if call.operation == Operation.REDUCE:
        return 0 if rank == call.root else _nbytes(call.outputs)
    return _nbytes(call.outputs if call.operation == Operation.ALL_REDUCE else call.inputs)


def _nbytes(tensors: Sequence[Pieces]) -> int:
    return sum(sum(pieces[1::2]) for pieces in tensors)
