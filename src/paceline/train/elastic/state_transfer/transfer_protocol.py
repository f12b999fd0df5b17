"""The messages between a receiver and a sender's child, and the division of a snapshot into chunks.

Both ends first prove that they hold the job's secret. A request is a struct of fixed size. A response is a frame that
consists of the length of its head, the number of later results that the sender has, the head (msgpack), and a body
whose length is in the head.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate

import msgspec
import torch
import xxhash

from paceline.comm.security.encryption import Connection
from paceline.comm.security.untrusted_peers import decode_untrusted
from paceline.train.elastic.agreement import BatchAssignment


class MissingChunks:
    """The chunks that a receiver still needs, and the senders from which it has requested them.

    When all remaining chunks have been requested, they are requested again from idle senders, so that a slow sender
    does not delay the transfer.

    >>> chunks = MissingChunks(2)
    >>> chunks.next_for("a"), chunks.next_for("b"), chunks.lost("b"), chunks.next_for("a")
    (0, 1, None, 1)
    """

    def __init__(self, count: int) -> None:
        self._waiting = list(range(count))[::-1]
        self._requested: dict[int, set[str]] = {}
        self._missing = set(range(count))

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have arrived."""
        return not self._missing

    def next_for(self, sender: str) -> int | None:
        """Returns the next chunk to request from `sender`, or None if all remaining chunks were requested from it."""
        while self._waiting:
            chunk = self._waiting.pop()
            if chunk in self._missing:
                self._requested.setdefault(chunk, set()).add(sender)
                return chunk
        shared = [chunk for chunk, senders in self._requested.items() if sender not in senders]
        if not shared:
            return None
        chunk = min(shared, key=lambda candidate: (len(self._requested[candidate]), candidate))
        self._requested[chunk].add(sender)
        return chunk

    def arrived(self, chunk: int) -> bool:
        """Records that a chunk has arrived; returns whether it is the first copy."""
        is_new = chunk in self._missing
        self._missing.discard(chunk)
        self._requested.pop(chunk, None)
        return is_new

    def lost(self, sender: str) -> None:
        """Returns to the queue the chunks that were requested only from this sender."""
        for chunk, senders in list(self._requested.items()):
            senders.discard(sender)
            if not senders:
                del self._requested[chunk]
                self._waiting.append(chunk)


class ChunkLayout:
    """The locations of the chunks. The concatenated buffers are cut every `chunk_bytes` bytes.

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
        """Returns the parts of a chunk as tuples (buffer index, first byte, end of the byte range)."""
        start, stop = chunk * self._chunk_bytes, min((chunk + 1) * self._chunk_bytes, self.nbytes)
        buffer, found = bisect_right(self._ends, start), []
        while start < stop:
            first = start - (self._ends[buffer] - self._sizes[buffer])
            last = min(self._sizes[buffer], first + stop - start)
            if last > first:
                found.append((buffer, first, last))
            start += last - first
            buffer += 1
        return found


CHANNEL = "transfer"  # the name of the channel in the handshake
CHUNK_BYTES = 4 << 20
NEAR = 1  # a receiver that lacks at most this many results is considered caught up
REQUEST = struct.Struct("<QQQQ")  # a RequestKind and three numbers
FRAME = struct.Struct("<QQ")
_LARGEST_HEAD = 1 << 30


class RequestKind(IntEnum):
    """The kinds of requests, each with up to three numbers."""

    CHUNK = 1  # (number): requests a chunk
    ITEM = 2  # (round, generation, steps): requests the round's next log item after this view and these steps
    FORGET = 3  # (round, -, steps): reports that the receiver has all earlier rounds and these steps; has no response


class _FrameHead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The head of a frame."""


TensorKinds = tuple[tuple[str, tuple[int, ...]], ...]  # the dtype and shape of each tensor in a body


def kinds_of(tensors: Sequence[torch.Tensor]) -> TensorKinds:
    """Returns the dtypes and shapes of tensors."""
    return tuple((str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)


class SnapshotContents(_FrameHead, frozen=True):
    """The description of a snapshot."""

    round: int  # the next round
    committed: int  # the digest of the previous round's result
    dealt: BatchAssignment  # the latest batch assignment
    body: bytes  # the encoded state without its buffers
    sizes: tuple[int, ...]  # the lengths of the buffers, in bytes


class SnapshotChunk(_FrameHead, frozen=True):
    """A chunk of the concatenated buffers. The bytes of the chunk form the body."""

    number: int
    nbytes: int
    digest: bytes


class RoundResult(_FrameHead, frozen=True):
    """The result of a committed round. The body holds the contiguous tensors; in a DDP loop it is empty."""

    round: int
    nbytes: int
    tensors: TensorKinds
    digest: int  # of the result
    state: int  # the members' digest of a part of their state before the round
    dealt: BatchAssignment  # the latest batch assignment
    before: int = 0  # the digest of the previous round's result


class OptimizerStep(_FrameHead, frozen=True):
    """An optimizer step that a DDP loop is about to perform.

    The body holds the contiguous gradients and then the tensors in the options.
    """

    round: int  # the next round
    after: int  # the digest of the previous round's result
    optimizer: str  # the name of the optimizer
    nbytes: int = 0
    tensors: TensorKinds = ()
    has_gradient: tuple[bool, ...] = ()  # for each parameter in the order of the groups
    options: bytes = b""  # the encoded options of the groups, such as the learning rate
    obstacle: str = ""  # the reason why the step cannot be repeated
    digest: bytes = b""  # of the body, added by the sender's child


class ViewEntered(_FrameHead, frozen=True):
    """The sender enters a new view with these members before the round."""

    round: int
    generation: int
    members: tuple[str, ...]


class LogEndReached(_FrameHead, frozen=True):
    """The receiver has caught up, and will get the requested item as soon as it is logged."""


LogItem = RoundResult | OptimizerStep | ViewEntered
FrameHead = SnapshotContents | SnapshotChunk | RoundResult | OptimizerStep | ViewEntered | LogEndReached
_heads = msgspec.msgpack.Decoder(FrameHead)


class BrokenTransferError(Exception):
    """Raised if the other end sent an unexpected message or disconnected."""


def encode_head(head: FrameHead) -> bytes:
    """Returns a head as bytes."""
    return msgspec.msgpack.encode(head)


def decode_head(data: bytes | bytearray | memoryview) -> FrameHead:
    """Decodes a received head; raises BrokenTransferError if the data is not one."""
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
    """Receives a frame up to its body; returns the head and the number of later results that the sender has.

    Raises BrokenTransferError or OSError if the sender disconnected or sent an invalid frame.
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
    """Fills `memory` with the next bytes; raises BrokenTransferError or OSError if the other end disconnected."""
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise BrokenTransferError("the connection was closed")
        memory = memory[count:]
