"""What a receiver and a sender's child send each other, after both have proved the job's secret.

A request is a fixed struct. An answer is a frame: the length of its head, how many results the sender has beyond, the
head (msgpack), and a body whose length the head says.

Which chunk of a snapshot is asked of which sender, and where in the buffers a chunk lies.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate

import msgspec
import xxhash

from paceline.comm.security.encryption import Connection
from paceline.comm.security.untrusted_peers import decode_untrusted
from paceline.train.elastic.worker.agreement import BatchAssignment


class MissingChunks:
    """The chunks that a receiver still needs; a sender that is lost costs those that it has not sent.

    When all that are left have been asked for, an idle sender is asked for them again, so that none holds the others up.

    >>> chunks = MissingChunks(2)
    >>> chunks.next_for("a"), chunks.next_for("b"), chunks.lost("b"), chunks.next_for("a")
    (0, 1, None, 1)
    """

    def __init__(self, count: int) -> None:
        self._waiting = list(range(count))[::-1]
        self._asked: dict[int, set[str]] = {}
        self._missing = set(range(count))

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have come."""
        return not self._missing

    def next_for(self, sender: str) -> int | None:
        """Returns the chunk that this sender is asked for next; None if it has to send all that are left."""
        while self._waiting:
            chunk = self._waiting.pop()
            if chunk in self._missing:
                self._asked.setdefault(chunk, set()).add(sender)
                return chunk
        shared = [chunk for chunk, senders in self._asked.items() if sender not in senders]
        if not shared:
            return None
        chunk = min(shared, key=lambda each: (len(self._asked[each]), each))
        self._asked[chunk].add(sender)
        return chunk

    def arrived(self, chunk: int) -> bool:
        """Notes that a chunk has come, whole; returns whether it had not come before."""
        is_new = chunk in self._missing
        self._missing.discard(chunk)
        self._asked.pop(chunk, None)
        return is_new

    def lost(self, sender: str) -> None:
        """Gives back what only this sender was asked for."""
        for chunk, senders in list(self._asked.items()):
            senders.discard(sender)
            if not senders:
                del self._asked[chunk]
                self._waiting.append(chunk)


class ChunkLayout:
    """Where chunks lie: the buffers are taken as one run of bytes, which is cut every `chunk_bytes`.

    >>> ChunkLayout([3, 0, 4], 5).spans(0)
    [(0, 0, 3), (2, 0, 2)]
    >>> ChunkLayout([3, 0, 4], 5).spans(1)
    [(2, 2, 4)]
    """

    def __init__(self, sizes: Sequence[int], chunk_bytes: int) -> None:
        self._sizes, self._chunk_bytes = sizes, chunk_bytes
        self._ends = list(accumulate(sizes))
        self.nbytes = self._ends[-1] if sizes else 0
        self.count = -(-self.nbytes // chunk_bytes)

    def spans(self, chunk: int) -> list[tuple[int, int, int]]:
        """Returns a chunk's parts: a buffer, and the first byte and the one after the last within it."""
        at, stop = chunk * self._chunk_bytes, min((chunk + 1) * self._chunk_bytes, self.nbytes)
        buffer, found = bisect_right(self._ends, at), []
        while at < stop:
            first = at - (self._ends[buffer] - self._sizes[buffer])
            last = min(self._sizes[buffer], first + stop - at)
            if last > first:
                found.append((buffer, first, last))
            at += last - first
            buffer += 1
        return found


CHANNEL = "transfer"  # of the handshake
CHUNK_BYTES = 4 << 20
NEAR = 1  # results behind the others with which a receiver counts as having caught up
REQUEST = struct.Struct("<QQQQ")  # an Ask and three numbers
FRAME = struct.Struct("<QQ")
_LARGEST_HEAD = 1 << 30


class RequestKind(IntEnum):
    """What a receiver asks for."""

    CHUNK = 1  # of this number
    ITEM = 2  # what the log has next for this round, after a view of this generation and so many steps
    FORGET = 3  # nothing: it has all of the rounds before this one, and so many steps of this one


class _FrameHead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The head of a frame."""


class SnapshotContents(_FrameHead, frozen=True):
    """What a snapshot holds: the encoded state without its buffers, and the buffers' lengths in bytes.

    Attributes:
        round: the round that comes next.
        committed: the digest of the result of the round before.
        dealt: the latest batch that was dealt out.
        body, sizes: see above.
    """

    round: int
    committed: int
    dealt: BatchAssignment
    body: bytes
    sizes: tuple[int, ...]


class SnapshotChunk(_FrameHead, frozen=True):
    """A part of the buffers, taken together; the body has its bytes."""

    number: int
    nbytes: int
    digest: bytes


class RoundResult(_FrameHead, frozen=True):
    """The result of a round, which was committed.

    Attributes:
        round: the round.
        nbytes: the length of the body: the tensors, contiguous. In the usual loop there are none.
        tensors: their dtypes and shapes.
        digest: of the result.
        state: the members' digest of a part of their state before the round.
        dealt: the latest batch that was dealt out.
        before: the digest of the result of the round before.
    """

    round: int
    nbytes: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    digest: int
    state: int
    dealt: BatchAssignment
    before: int = 0


class OptimizerStep(_FrameHead, frozen=True):
    """A step of an optimizer in the usual loop, as it is about to be made.

    Attributes:
        round: the round that comes next.
        after: the digest of the result of the round before.
        optimizer: its name.
        nbytes: the length of the body: the gradients, and then tensors of the options, contiguous.
        tensors: their dtypes and shapes.
        has_gradient: for each parameter in the order of the groups, whether it has a gradient.
        options: those of the groups, such as the learning rate, encoded.
        obstacle: why the step does not follow from all this, if it does not.
        digest: of the body; whoever sends it adds that.
    """

    round: int
    after: int
    optimizer: str
    nbytes: int = 0
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    has_gradient: tuple[bool, ...] = ()
    options: bytes = b""
    obstacle: str = ""
    digest: bytes = b""


class ViewEntered(_FrameHead, frozen=True):
    """The members of the sender's view enter another view before the round."""

    round: int
    generation: int
    members: tuple[str, ...]


class NothingYet(_FrameHead, frozen=True):
    """The receiver has caught up: the sender has nothing that it asks for, and sends that as soon as it has."""


LogItem = RoundResult | OptimizerStep | ViewEntered
FrameHead = SnapshotContents | SnapshotChunk | RoundResult | OptimizerStep | ViewEntered | NothingYet
_heads = msgspec.msgpack.Decoder(FrameHead)


class BrokenTransferError(Exception):
    """A sender sent something else than it should, or nothing any more."""


def encode_head(head: FrameHead) -> bytes:
    """Returns a head as bytes."""
    return msgspec.msgpack.encode(head)


def decode_head(data: bytes | bytearray | memoryview) -> FrameHead:
    """Returns a head that was received.

    Raises:
        BrokenTransferError: it is none.
    """
    try:
        head: FrameHead = decode_untrusted(_heads.decode, data)
    except ValueError as error:
        raise BrokenTransferError(f"a head that cannot be read: {error}") from error
    return head


def body_bytes(head: FrameHead) -> int:
    """Returns the length of the body that follows a head."""
    return head.nbytes if isinstance(head, (SnapshotChunk, RoundResult, OptimizerStep)) else 0


def digest_of_chunk(parts: Sequence[memoryview]) -> bytes:
    """Returns the digest (XXH3, 128 bits) of a chunk."""
    total = xxhash.xxh3_128(seed=0)
    for part in parts:
        total.update(part)
    return total.digest()


def send_head(connection: Connection, head: FrameHead, ahead: int = 0) -> None:
    """Sends a frame without its body."""
    data = encode_head(head)
    connection.sendall(FRAME.pack(len(data), ahead) + data)


def receive_head(connection: Connection) -> tuple[FrameHead, int]:
    """Receives a frame up to its body; returns the head, and how many results the sender has beyond.

    Raises:
        BrokenTransferError, OSError: the sender is gone, or sent something else.
    """
    prefix = memoryview(bytearray(FRAME.size))
    receive_into(connection, prefix)
    length, ahead = FRAME.unpack(prefix)
    if length > _LARGEST_HEAD:
        raise BrokenTransferError(f"a head of {length} bytes")
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return decode_head(data), ahead


def receive_into(connection: Connection, memory: memoryview) -> None:
    """Fills `memory` with what comes next.

    Raises:
        BrokenTransferError, OSError: the other end is gone.
    """
    at = 0
    while at < len(memory):
        count = connection.recv_into(memory[at:])
        if not count:
            raise BrokenTransferError("the connection was closed")
        at += count
